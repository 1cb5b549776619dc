#!/usr/bin/env python3
"""SGLang issue 35884: health probes that time out while the server is busy; are their own requests left behind?

usage: python sglang_35884.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def main() -> int:
    def probe(_: int) -> str:
        try:
            return str(requests.get(BASE + "/health_generate", timeout=0.3).status_code)
        except requests.Timeout:
            return "timed out"

    rows = int(requests.get(BASE + "/server_info", timeout=60).json()["max_running_requests"])
    with ThreadPoolExecutor(rows + 12) as pool:
        busy = [pool.submit(ask, ids(1500), 60) for _ in range(rows + 4)]
        time.sleep(0.5)
        said = list(pool.map(probe, range(24)))
        done = sum(one.result()["status"] == 200 for one in busy)
    left = time.monotonic()
    while (now := load())["num_running_reqs"] + now["num_waiting_reqs"] and time.monotonic() < left + 30:
        time.sleep(0.2)
    counts = {one: said.count(one) for one in sorted(set(said))}
    print(f"probes: {counts}; {done} of {rows + 4} requests served")
    print(
        f"{time.monotonic() - left:.1f} s later {now['num_running_reqs']} run, {now['num_waiting_reqs']} wait"
    )
    fresh = ask(ids(16), 4, timeout=60)["status"]
    health = requests.get(BASE + "/health_generate", timeout=60).status_code
    print(f"a fresh request: HTTP {fresh}, /health_generate: {health}")
    return 1 if now["num_running_reqs"] + now["num_waiting_reqs"] or fresh != 200 or done < rows + 4 else 0


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
