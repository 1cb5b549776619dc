#!/usr/bin/env python3
"""SGLang PR 21875: many opens at once under the client's own ids; sessions closed while a turn decodes.

usage: python sglang_21875.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


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
    names = [f"open-{at}" for at in range(32)]

    def opened(name: str) -> bool:
        wanted = {"capacity_of_str_len": 1 << 20, "streaming": True, "session_id": name}
        return bool(requests.post(BASE + "/open_session", json=wanted, timeout=60).json() == name)

    def closed(name: str) -> None:
        requests.post(BASE + "/close_session", json={"session_id": name}, timeout=60).raise_for_status()

    with ThreadPoolExecutor(32) as pool:
        good = sum(pool.map(opened, names))
        turns = [pool.submit(ask, ids(24), 64, name) for name in names[:8]]
        while load()["num_running_reqs"] < 4 and not all(turn.done() for turn in turns):
            time.sleep(0.02)
        list(pool.map(closed, names))
        ends = [turn.result()["meta_info"].get("finish_reason", {}).get("type", "refused") for turn in turns]
    print(f"{good} of 32 opened at once; turns closed in flight ended as {ends}")
    at_rest = account()
    missing = at_rest["max_total_num_tokens"] - at_rest["kv_available_tokens"] - at_rest["kv_evictable_tokens"]
    held = at_rest["streaming_session_held_tokens"]
    print(f"at rest: {held:.0f} tokens held by sessions, {missing:.0f} neither free nor evictable")
    return 1 if good < 32 or held or missing else 0


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
