#!/usr/bin/env python3
"""vLLM issue 55005: greedy requests alone and beside a sampled one, on a server that speculates.

usage: python vllm_55005.py http://127.0.0.1:8000    (needs requests; see the page beside this)
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
# Nats. A greedy token that stands so far below the best one was not chosen by rounding.
FAR = 1.0


def ask(prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "logprobs": 1, **more}
    reply = requests.post(BASE + "/v1/completions", json=body, timeout=300)
    reply.raise_for_status()
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def below_the_best(choice: dict[str, Any]) -> list[float]:
    """How far each token's log-prob stands below that of the likeliest one at its place."""
    logprobs = choice["logprobs"]
    pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [max(top.values()) - own for own, top in pairs]


def main() -> int:
    prompts = [[RNG.randrange(3, 500) for _ in range(40)] for _ in range(6)]
    far = {}
    for beside in (None, {"temperature": 1}):
        with ThreadPoolExecutor(1 + len(prompts)) as pool:
            if beside is not None:
                pool.submit(ask, prompts[0], 400, **beside)
            gaps = [below_the_best(one) for one in pool.map(lambda prompt: ask(prompt, 24), prompts)]
        far[beside is not None] = sum(gap > FAR for some in gaps for gap in some)
        where = f"beside a request with {beside}" if beside else "by themselves"
        print(
            f"6 greedy requests {where}: {far[beside is not None]} of 144 tokens stand more than {FAR:g} below "
            f"the best, the worst {max(gap for some in gaps for gap in some):.2f}"
        )
    return 1 if far[True] > far[False] else 0


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
