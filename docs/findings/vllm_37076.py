#!/usr/bin/env python3
"""vLLM issue 37076: equal prompts in one step; does one read blocks that nobody has written yet?

usage: python vllm_37076.py http://127.0.0.1:8000    (needs requests; see the page beside this)
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


def logprobs(prompt: list[int], new: int = 32) -> list[float]:
    told: list[float] = ask(prompt, new, logprobs=0)["logprobs"]["token_logprobs"]
    return told


def apart(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def all_free(seconds: float = 20) -> bool:
    """Whether every block gets free: vLLM drops its prefix cache only then. Needs VLLM_SERVER_DEV_MODE=1."""
    until = time.monotonic() + seconds
    while not requests.post(BASE + "/reset_prefix_cache", timeout=60).json()["success"]:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def main() -> int:
    wrong, worst = 0, 0.0
    with ThreadPoolExecutor(8) as pool:
        for size in (64, 600, 600, 600, 600, 600, 600, 600, 600, 600):
            anchor = ids(size)
            tails = [ids(8), ids(8)]
            work = [anchor, anchor, anchor + tails[0], anchor + tails[1]] * 2
            together = list(pool.map(logprobs, work))
            all_free()
            alone = []
            for prompt in work[:4]:
                alone.append(logprobs(prompt))
                all_free()
            off = max(apart(one, alone[at % 4]) for at, one in enumerate(together))
            worst = max(worst, off)
            wrong += off > 0.2
    print(
        f"10 times 8 twins at once: {wrong} unlike the same prompts alone and cold; off by at most {worst:.1e}"
    )
    return 1 if wrong else 0


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
