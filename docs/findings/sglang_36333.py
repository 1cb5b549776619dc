#!/usr/bin/env python3
"""SGLang issue 36333 and PR 35255: clients leave in the middle of long requests; how long do these run on?

usage: python sglang_36333.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
import time
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


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


def main() -> int:
    faults = []
    for stream in (True, False, True, False):
        request = body(ids(24), 3000, stream=stream)
        try:
            with requests.post(BASE + "/generate", json=request, stream=True, timeout=(5, 1.0)) as reply:
                next(reply.iter_lines())
        except requests.Timeout:
            pass
        left = time.monotonic()
        while (now := load())["num_running_reqs"] and time.monotonic() < left + 20:
            time.sleep(0.1)
        gone = time.monotonic() - left
        print(f"stream {stream}: {now['num_running_reqs']} run {gone:.1f} s after the client left")
        faults += [stream] if now["num_running_reqs"] else []
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
