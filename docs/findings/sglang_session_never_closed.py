#!/usr/bin/env python3
"""SGLang: a session's turn ends while it waits retracted in the queue; is the session ever closed?

usage: python sglang_session_never_closed.py http://127.0.0.1:30000    (needs requests; see its page)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import requests

BASE = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""
RNG = random.Random(0)
# What happens to a turn of a session, in this order, once it has shown some tokens.
WAYS = ("abort close", "close abort", "abort timeout", "close", "leave close", "close leave")


def ids(count: int) -> list[int]:
    return [RNG.randrange(3, 500) for _ in range(count)]


def body(prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


def post(path: str, wanted: dict[str, Any]) -> requests.Response:
    return requests.post(BASE + path, json=wanted, timeout=120)


def opened(session: str, timeout: float | None = None) -> bool:
    """False where the server says that it has this session already."""
    wanted = {"capacity_of_str_len": 1 << 20, "streaming": True, "session_id": session, "timeout": timeout}
    return post("/open_session", wanted).status_code == 200


def held() -> float:
    """Tokens that sessions hold, from /metrics; a small request first, since gauges move only with a batch."""
    post("/generate", body(ids(4), 8))
    time.sleep(1)
    lines = requests.get(BASE + "/metrics", timeout=60).text.splitlines()
    name = "sglang:streaming_session_held_tokens"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def turn(session: str, way: str, when: int) -> None:
    """A turn that meets `way` when it has shown `when` tokens. It is long where the server must first notice
    that the client left, which takes it some seconds.
    """
    rid, new = f"{session}-turn-", 3000 if "leave" in way else 200
    request = body(ids(24), new, stream=True, rid=rid, session_params={"id": session})
    with requests.post(BASE + "/generate", json=request, stream=True, timeout=60) as reply:
        for at, _ in enumerate(each for each in reply.iter_lines() if each.startswith(b"data: {")):
            if at != when:
                continue
            for step in way.split():
                if step == "abort":
                    post("/abort_request", {"rid": rid})
                elif step == "close":
                    post("/close_session", {"session_id": session})
                elif step == "leave":
                    reply.close()
                    time.sleep(3)
            if "leave" in way:
                return


def main() -> int:
    """Start it with forced retraction every 3 steps."""
    before, stop, stuck = held(), Event(), 0
    sessions = {way: [f"{way.replace(' ', '-')}-{at}" for at in range(4)] for way in WAYS}

    def beside() -> None:
        while not stop.is_set():
            post("/generate", body(ids(16), 3000))

    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(beside)
        for way, names in sessions.items():
            for at, session in enumerate(names):
                assert opened(session, timeout=4 if "timeout" in way else None)
                turn(session, way, 4 + at)
        stop.set()
        decoding.result()
    time.sleep(8)  # the reaper looks every second, a timeout is 4
    tokens = held() - before
    for way, names in sessions.items():
        left = sum(not opened(session) for session in names)
        stuck += left
        print(f"{way}: {left} of {len(names)} sessions are still open")
    print(f"{tokens:.0f} tokens are held by sessions that nobody has")
    return 1 if stuck else 0


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
