#!/usr/bin/env python3
"""vLLM PR 49620 (issue 41190): requests are preempted, with or without speculation; are they right?

usage: python vllm_49620.py http://127.0.0.1:8000    (needs requests; see the page beside this)
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


def preemptions() -> float:
    lines = requests.get(BASE + "/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


def answer(prompt: list[int]) -> tuple[list[int], list[float]]:
    choice = ask(prompt, 300, timeout=300, logprobs=0)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def off(prompt: list[int], answered: tuple[list[int], list[float]]) -> float:
    """How far the log-probs of an answer are from a scoring of the same tokens, so that no near tie matters."""
    tokens, told = answered
    scored: list[float] = ask(prompt + tokens, 1, echo=True, logprobs=0)["logprobs"]["token_logprobs"]
    scored = scored[len(prompt) :]
    return max(abs(a - b) for a, b in zip(told, scored[: len(told)], strict=True))


def main() -> int:
    """Start it with a pool that holds only one or two requests of full length."""
    worst = control = 0.0
    wrong, happened = 0, 0.0
    for _ in range(3):
        before = preemptions()
        prompts = [ids(50 + at) for at in range(6)]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(answer, prompts))
        happened += preemptions() - before
        found = [off(prompt, one) for prompt, one in zip(prompts, together, strict=True)]
        worst, wrong = max(worst, *found), wrong + sum(one > 0.5 for one in found)
        control = max(control, *(off(prompt, answer(prompt)) for prompt in prompts))
    free = all_free()
    print(
        f"{happened:.0f} preemptions; 18 requests of 300 tokens at once: log-probs off by {worst:.1e} at most, "
        f"{wrong} wrong; one by one {control:.1e}; every block free again: {free}"
    )
    if not happened:
        print("nothing was preempted: this proves nothing")
    return 1 if wrong or not free or not happened else 0


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
