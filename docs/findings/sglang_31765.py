#!/usr/bin/env python3
"""SGLang issue 31765: a session's turn is aborted while it waits in the queue; the session takes its next turn.

usage: python sglang_31765.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def opened(session: str) -> bool:
    """False where the server says that it has this session already."""
    wanted = {"capacity_of_str_len": 1 << 20, "streaming": True, "session_id": session}
    return requests.post(BASE + "/open_session", json=wanted, timeout=60).status_code == 200


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


def aborted_in_the_queue(session: str, rows: int, past: int) -> dict[str, Any]:
    """The answer of a turn that is aborted while plain requests hold every row."""
    with ThreadPoolExecutor(rows + 3) as pool:
        names = [f"{session}-filler-{at}-" for at in range(rows + 2)]
        fillers = [pool.submit(ask, ids(8), 600, rid=name) for name in names]
        deadline = time.monotonic() + 60
        while load()["num_running_reqs"] < rows - past and time.monotonic() < deadline:
            time.sleep(0.05)
        turn = pool.submit(ask, ids(16), 8, session, rid=f"{session}-queued")
        time.sleep(0.5)
        for name in (f"{session}-queued", *names):
            requests.post(BASE + "/abort_request", json={"rid": name}, timeout=60)
        for filler in fillers:
            filler.result()
        return turn.result()


def main() -> int:
    rows = int(requests.get(BASE + "/server_info", timeout=60).json()["max_running_requests"])
    queued = stuck = wrong = kept = 0
    for attempt in range(8):
        session, past = f"queued-{attempt}", attempt % 2
        assert opened(session)
        if past:
            ask(ids(16), 4, session)
        answer = aborted_in_the_queue(session, rows, past)
        end = answer["meta_info"].get("finish_reason")
        queued += bool(end) and end.get("type") == "abort" and not answer["output_ids"]
        told = f"queued turn: {end}"
        if attempt < 4:
            for _ in range(20):
                after = ask(ids(16), 8, session)
                if after["status"] == 200 and after["meta_info"]["finish_reason"]["type"] == "length":
                    break
                time.sleep(0.5)
            else:
                stuck += 1
            found = after["meta_info"].get("prompt_tokens")
            wrong += after["status"] == 200 and found != 16 + 20 * past
            told += f"; next turn: HTTP {after['status']}, prompt of {found} (expected {16 + 20 * past})"
        requests.post(BASE + "/close_session", json={"session_id": session}, timeout=60)
        if attempt >= 4:
            time.sleep(3)  # a close that was put off is looked at every second
            kept += not opened(session)
        print(told)
    print(
        f"{queued} of 8 turns were aborted before a token; of 4 sessions {stuck} never took another turn and "
        f"{wrong} took it with another history; of 4 that were closed at once {kept} are still open"
    )
    return 1 if stuck or wrong or kept else 0


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
