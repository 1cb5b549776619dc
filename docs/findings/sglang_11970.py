#!/usr/bin/env python3
"""SGLang issue 11970 (also 4977, 6888, 7111, 7130): decodes outgrow the pool, until requests are retracted.

usage: python sglang_11970.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def body(prompt: list[int], new: int, session: str = "", **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
    turn = {"session_params": {"id": session}} if session else {}
    return {"input_ids": prompt, "sampling_params": sampling, **turn, **more}


def ask(prompt: list[int], new: int, session: str = "", timeout: float = 120, **more: Any) -> dict[str, Any]:
    """The answer with its HTTP status; a refused request has no meta_info, so that gets {}."""
    reply = requests.post(BASE + "/generate", json=body(prompt, new, session, **more), timeout=timeout)
    return {"meta_info": {}, "output_ids": [], **reply.json(), "status": reply.status_code}


def account() -> dict[str, float]:
    """Pools and sessions at rest, from /metrics; a small request first, since gauges move only with a batch."""
    time.sleep(2)
    ask(ids(4), 8)
    time.sleep(1)
    lines = requests.get(BASE + "/metrics", timeout=60).text.splitlines()
    told = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("sglang:")}
    names = (
        "max_total_num_tokens",
        "kv_available_tokens",
        "kv_evictable_tokens",
        "streaming_session_held_tokens",
    )
    return {name: told[f"sglang:{name}"] for name in names if f"sglang:{name}" in told}


def main() -> int:
    """Start it with a pool of 2048 tokens; the requests grow to about three times that."""
    faults = []
    # Without ignore_eos: then the scheduler admits more than will fit, and has to retract.
    sampling = {"temperature": 0, "max_new_tokens": 220}
    for attempt in range(3):
        prompts = [ids(17 + at % 16) for at in range(24)]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda one: ask(one, 220, timeout=300, sampling_params=sampling), prompts))
        retracted = sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)
        ends = [answer["meta_info"].get("finish_reason", {}).get("type") for answer in answers]
        short = [end for end in ends if end not in ("length", "stop")]
        at_rest = account()
        known = at_rest["kv_available_tokens"] + at_rest["kv_evictable_tokens"]
        missing = at_rest["max_total_num_tokens"] - known
        print(
            f"round {attempt + 1}: {len(answers) - len(short)} of 24 whole, {retracted} retractions; "
            f"at rest {missing:.0f} tokens neither free nor evictable"
        )
        if missing or short:
            faults.append(attempt)
    return 1 if faults else 0


if __name__ == "__main__":
    try:
        requests.get(BASE + "/server_info", timeout=60)
    except requests.RequestException:
        print(f"no server at {BASE or 'the URL, none was given'}")
        sys.exit(2)
    try:
        sys.exit(main())
    except requests.RequestException as error:
        print(f"the server stopped answering: {type(error).__name__}")
        sys.exit(1)
