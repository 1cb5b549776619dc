#!/usr/bin/env python3
"""SGLang issue 27024: idle sessions hold most of a small pool; does a request that needs more ever run?

usage: python sglang_27024.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def open_session() -> str:
    reply = requests.post(
        BASE + "/open_session", json={"capacity_of_str_len": 1 << 20, "streaming": True}, timeout=60
    )
    reply.raise_for_status()
    return str(reply.json())


def close(session: str) -> None:
    requests.post(BASE + "/close_session", json={"session_id": session}, timeout=60).raise_for_status()


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


def main() -> int:
    total = int(load()["max_total_num_tokens"])
    sessions, size = [open_session() for _ in range(4)], total // 5
    for session in sessions:
        ask(ids(size), 8, session)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(ask, ids(size + size // 2), 8)
        time.sleep(20)
        stuck = not waiting.done()
        said = [requests.get(BASE + path, timeout=60).status_code for path in ("/health", "/ready")]
        now = load()
        print(
            f"4 idle sessions hold 4 x {size + 8} of {total} tokens; a request of {size + size // 2}: "
            f"{'still waits after 20 s' if stuck else waiting.result()['meta_info'].get('finish_reason')}; "
            f"/health and /ready say {said}, waiting {now['num_waiting_reqs']}, used {now['num_used_tokens']}"
        )
        own = pool.submit(ask, ids(4), 4, sessions[0])
        time.sleep(10)
        print(
            "a turn of a session that has its KV, behind it:",
            "went on" if own.done() else "no progress in 10 s",
        )
        close(sessions[-1])
        close(sessions[-2])
        time.sleep(5)
        freed = waiting.done() and own.done()
        print("after two closes both", "went on" if freed else "still wait")
        for session in sessions[:2]:
            close(session)
        ends = [one.result()["meta_info"].get("finish_reason") for one in (waiting, own)]
    print("at the end:", ends)
    return 1 if stuck or not freed else 0


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
