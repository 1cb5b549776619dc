#!/usr/bin/env python3
"""SGLang PR 37583: as many idle sessions as the server has rows, then a further turn of each.

usage: python sglang_37583.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def second(session: str, turn: int) -> str:
    try:
        meta = ask(ids(16), 4, session, timeout=20)["meta_info"]
    except requests.Timeout:
        return f"turn {turn} of {session[:6]} made no progress in 20 s"
    return (
        "" if meta.get("prompt_tokens") == 20 * turn - 4 else f"turn {turn}: prompt {meta.get('prompt_tokens')}"
    )


def idle(count: int, rows: int) -> bool:
    """Three turns of so many sessions, all of a round at once; whether every one went on."""
    sessions = [open_session() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for turn in range(1, 4):
            faults = [fault for fault in pool.map(second, sessions, [turn] * count) if fault]
            if faults:
                break
    healthy = requests.get(BASE + "/health", timeout=60).status_code
    close(sessions[0])
    time.sleep(3)
    after = second(sessions[1], turn + (not faults))
    print(
        f"{count} sessions on {rows} rows: {len(faults)} turns stuck; {', '.join(faults[:2]) or 'all went on'}"
    )
    print(f"  /health said {healthy}; with one session closed, the next one's turn: {after or 'went on'}")
    for session in sessions[1:]:
        close(session)
    return not faults


def main() -> int:
    rows = int(requests.get(BASE + "/server_info", timeout=60).json()["max_running_requests"])
    if not idle(rows - 1, rows):
        print("the control failed, so what follows proves nothing")
    return max(not idle(rows, rows) for _ in range(3))


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
