#!/usr/bin/env python3
"""SGLang issue 33783: pause_generation(mode="retract") with requests in flight; which KV stays in use?

usage: python sglang_33783.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def pools() -> dict[str, float]:
    lines = requests.get(BASE + "/metrics", timeout=60).text.splitlines()
    told = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("sglang:")}
    return {name: told[f"sglang:kv_{name}_tokens"] for name in ("used", "evictable", "available")}


def main() -> int:
    requests.post(BASE + "/flush_cache", timeout=60)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, ids(1000), 300) for _ in range(4)]
        while load()["num_running_reqs"] < 4:
            time.sleep(0.05)
        time.sleep(1)
        requests.post(BASE + "/pause_generation", json={"mode": "retract"}, timeout=60).raise_for_status()
        time.sleep(2)
        paused = pools()
        stale = load()
        print(f"paused, by /metrics: {paused}")
        print(f"by /v1/loads: {stale['num_running_reqs']} run, {stale['num_used_tokens']} tokens used")
        requests.post(BASE + "/continue_generation", json={}, timeout=60).raise_for_status()
        whole = sum(len(one.result()["output_ids"]) == 300 for one in running)
    print(f"{whole} of 4 went on to their end")
    return 1 if paused["used"] + paused["evictable"] or whole < 4 else 0


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
