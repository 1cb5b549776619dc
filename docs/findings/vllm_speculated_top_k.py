#!/usr/bin/env python3
"""vLLM: one request with top_k on a server that speculates.

usage: python vllm_speculated_top_k.py http://127.0.0.1:8000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
from typing import Any

import requests

BASE = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""
RNG = random.Random(0)


def ask(**more: Any) -> requests.Response:
    body = {"prompt": [RNG.randrange(3, 500) for _ in range(40)], "max_tokens": 8, "ignore_eos": True, **more}
    return requests.post(BASE + "/v1/completions", json=body, timeout=120)


def main() -> int:
    for more in (
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_p": 0.5},
        {"temperature": 1, "top_k": 5},
    ):
        print(f"{more}: ", end="", flush=True)
        print(f"HTTP {(reply := ask(**more)).status_code}", "" if reply.ok else reply.text[:200], flush=True)
        if reply.status_code >= 500:
            return 1
    return 0


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
