#!/usr/bin/env python3
"""vLLM PR 12284: /reset_prefix_cache must say whether it did: no while a request holds blocks, yes at rest.

usage: python vllm_12284.py http://127.0.0.1:8000    (needs requests; see the page beside this)
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


def reset() -> bool:
    """Whether every block is free: vLLM drops its prefix cache only then. Needs VLLM_SERVER_DEV_MODE=1."""
    return bool(requests.post(BASE + "/reset_prefix_cache", timeout=60).json()["success"])


def main() -> int:
    faults = []
    for _ in range(5):
        prompt = ids(200)
        ask(prompt, 4)
        if not reset():
            faults.append("refused at rest")
        request = body(prompt, 600, stream=True)
        with requests.post(BASE + "/v1/completions", json=request, stream=True, timeout=60) as reply:
            lines = reply.iter_lines()  # kept: a dropped iterator closes the connection
            next(lines)
            if reset():
                faults.append("said yes while a request held blocks")
        began = time.monotonic()
        while not reset() and time.monotonic() < began + 20:
            time.sleep(0.05)
        waited = time.monotonic() - began
        print(f"yes {waited:.2f} s after a running request's client had left")
        if waited > 20:
            faults.append("refused for 20 s after the client had left")
    print("\n".join(faults) or "5 of 5 answers were true")
    return 1 if faults else 0


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
