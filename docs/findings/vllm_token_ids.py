#!/usr/bin/env python3
"""vLLM: a prompt with a token id that the vocabulary does not have, on a server without a tokenizer.

usage: python vllm_token_ids.py http://127.0.0.1:8000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import requests

BASE = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""
RNG = random.Random(0)


def ids(count: int) -> list[int]:
    return [RNG.randrange(3, 500) for _ in range(count)]


def body(prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def ask(prompt: list[int], new: int, timeout: float = 120, **more: Any) -> dict[str, Any]:
    reply = requests.post(BASE + "/v1/completions", json=body(prompt, new, **more), timeout=timeout)
    reply.raise_for_status()
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def main() -> int:
    size = int(requests.get(BASE + "/v1/models", timeout=60).json()["data"][0]["max_model_len"])
    print(f"a good request gave {len(ask(ids(16), 4)['token_ids'])} tokens (context {size})")
    reply = requests.post(BASE + "/v1/completions", json=body([5, 6, 600000, 7], 4), timeout=60)
    print(f"id 600000: HTTP {reply.status_code} {reply.text[:200]}")
    time.sleep(3)
    healthy = requests.get(BASE + "/health", timeout=60).status_code
    print(f"a good request behind it gave {len(ask(ids(16), 4)['token_ids'])} tokens, /health {healthy}")
    return 1 if reply.status_code >= 500 or reply.status_code < 400 else 0


if __name__ == "__main__":
    try:
        requests.get(BASE + "/version", timeout=60)
    except requests.RequestException:
        print(f"no server at {BASE or 'the URL, none was given'}")
        sys.exit(2)
    try:
        sys.exit(main())
    except requests.RequestException as error:
        print(f"the server stopped answering: {type(error).__name__}")
        sys.exit(1)
