#!/usr/bin/env python3
"""vLLM issue 42085 and PRs 3347 and 22209: long requests across a sliding window, in a row and on one prefix.

usage: python vllm_42085.py http://127.0.0.1:8000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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


def all_free(seconds: float = 20) -> bool:
    """Whether every block gets free: vLLM drops its prefix cache only then. Needs VLLM_SERVER_DEV_MODE=1."""
    until = time.monotonic() + seconds
    while not requests.post(BASE + "/reset_prefix_cache", timeout=60).json()["success"]:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def main() -> int:
    """Start it on a model with sliding-window layers."""
    faults = 0
    for size in (300, 900, 1500):
        prefix = ids(size)
        for _ in range(2):
            ask(prefix, 200, timeout=300)
        with ThreadPoolExecutor(4) as pool:
            tails = [prefix + ids(8 + at) for at in range(8)]
            made = [len(one["token_ids"]) for one in pool.map(lambda one: ask(one, 150, timeout=300), tails)]
        free = all_free()
        faults += not free or made != [150] * 8
        print(
            f"prefix of {size}: 2 in a row and 8 side by side gave {set(made)} tokens; all blocks free: {free}"
        )
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
