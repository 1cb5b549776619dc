#!/usr/bin/env python3
"""vLLM issues 39589 and 39146: 128 and 256 prompt tokens at once, against the same requests one by one.

usage: python vllm_39589.py http://127.0.0.1:8000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
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


def logprobs(prompt: list[int], new: int = 32) -> list[float]:
    told: list[float] = ask(prompt, new, logprobs=0)["logprobs"]["token_logprobs"]
    return told


def apart(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def main() -> int:
    pairs = [(ids(128), ids(256)) for _ in range(50)]
    alone = [[logprobs(prompt) for prompt in pair] for pair in pairs]
    again = [[logprobs(prompt) for prompt in pair] for pair in pairs]
    control = max(apart(*two) for one in zip(alone, again, strict=True) for two in zip(*one, strict=True))
    changed, worst = 0, 0.0
    with ThreadPoolExecutor(2) as pool:
        for pair, wanted in zip(pairs, alone, strict=True):
            found = list(pool.map(logprobs, pair))
            off = max(apart(one, two) for one, two in zip(wanted, found, strict=True))
            worst = max(worst, off)
            changed += off > 0.2
    print(
        f"{changed} of 50 pairs diverge, log-probs off by at most {worst:.1e}; one by one twice: {control:.1e}"
    )
    return 1 if changed else 0


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
