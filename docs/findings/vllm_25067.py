#!/usr/bin/env python3
"""vLLM PRs 25067, 18485 and 29987: requests are aborted around their last step; does every block come back?

usage: python vllm_25067.py http://127.0.0.1:8000    (needs requests; see the page beside this)
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


def left(at: int) -> int:
    """A request of 24 tokens whose client leaves at its (18 + at % 8)-th event, or aborts it by its id then."""
    name = f"near-the-end-{at}"
    request = body(ids(70), 24, stream=True, request_id=name)
    shown = 0
    with requests.post(BASE + "/v1/completions", json=request, stream=True, timeout=120) as reply:
        for line in reply.iter_lines():
            shown += line.startswith(b"data: {")
            if shown == 18 + at % 8 and at % 2:
                break
            if shown == 18 + at % 8 and line:
                wanted = {"request_ids": [f"cmpl-{name}-0", f"cmpl-{name}"]}
                requests.post(BASE + "/abort_requests", json=wanted, timeout=60)
    return shown


def main() -> int:
    faults = 0
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            shown = list(pool.map(left, range(64)))
        free = all_free()
        faults += not free
        print(f"64 requests stopped after {min(shown)} to {max(shown)} events; every block free again: {free}")
    fresh = len(ask(ids(40), 8)["token_ids"])
    print(f"a fresh request gave {fresh} of 8 tokens")
    return 1 if faults or fresh != 8 else 0


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
