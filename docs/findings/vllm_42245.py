#!/usr/bin/env python3
"""vLLM PR 42245 (issue 42019): log-probs of a prompt whose beginning is in the prefix cache.

usage: python vllm_42245.py http://127.0.0.1:8000    (needs requests; see the page beside this)
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


def prompt_logprobs(prompt: list[int], **how: Any) -> list[float]:
    """The log-prob of each prompt token but the first, asked for as how says."""
    choice = ask(prompt, 1, **how)
    if "echo" in how:
        echoed: list[float] = choice["logprobs"]["token_logprobs"][1 : len(prompt)]
        return echoed
    told = choice["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for entry, token in zip(told, prompt[1:], strict=True)]


def main() -> int:
    worst, missing = 0.0, 0
    for size in (100, 257, 700):
        prompt = ids(size)
        ways: list[dict[str, Any]] = [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}]
        told = [prompt_logprobs(prompt, **way) for way in ways]
        ask(prompt[: size // 2], 8)
        ask(prompt + ids(20), 8)
        told += [prompt_logprobs(prompt, **way) for way in ways]
        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(prompt_logprobs, prompt, **way) for way in ways * 2]
            told += [one.result() for one in work]
        missing += sum(one is None for row in told for one in row)
        apart = max(abs(a - b) for row in told[1:] for a, b in zip(told[0], row, strict=True))
        worst = max(worst, apart)
        print(f"prompt of {size}: cold, cached and beside each other, off by at most {apart:.1e}")
    return 1 if worst > 0.2 or missing else 0


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
