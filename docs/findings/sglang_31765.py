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


def open_session() -> str:
    reply = requests.post(
        BASE + "/open_session", json={"capacity_of_str_len": 1 << 20, "streaming": True}, timeout=60
    )
    reply.raise_for_status()
    return str(reply.json())


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


def main() -> int:
    rows = int(requests.get(BASE + "/server_info", timeout=60).json()["max_running_requests"])
    stuck, queued = 0, 0
    for attempt in range(4):
        session, past = open_session(), attempt % 2
        if past:
            ask(ids(16), 4, session)
        with ThreadPoolExecutor(rows + 3) as pool:
            fillers = [pool.submit(ask, ids(8), 600, rid=f"{attempt}-filler-{at}-") for at in range(rows + 2)]
            deadline = time.monotonic() + 60
            while load()["num_running_reqs"] < rows - past and time.monotonic() < deadline:
                time.sleep(0.05)
            turn = pool.submit(ask, ids(16), 8, session, rid=f"queued-{attempt}")
            time.sleep(0.5)
            requests.post(BASE + "/abort_request", json={"rid": f"queued-{attempt}"}, timeout=60)
            answer = turn.result()
            for at in range(rows + 2):
                requests.post(BASE + "/abort_request", json={"rid": f"{attempt}-filler-{at}-"}, timeout=60)
            ends = {filler.result()["meta_info"].get("finish_reason", {}).get("type") for filler in fillers}
        aborted = answer["meta_info"].get("finish_reason", {}).get("type") == "abort"
        queued += aborted and not answer["output_ids"]
        for _ in range(20):
            after = ask(ids(16), 8, session)
            if after["status"] == 200 and after["meta_info"]["finish_reason"]["type"] == "length":
                break
            time.sleep(0.5)
        else:
            stuck += 1
        requests.post(BASE + "/close_session", json={"session_id": session}, timeout=60)
        print(
            f"queued turn: {answer['meta_info'].get('finish_reason')}, fillers {ends}; next turn: "
            f"HTTP {after['status']}, {after['meta_info'].get('prompt_tokens')} prompt tokens "
            f"(expected {16 + 20 * past}), {after['meta_info'].get('finish_reason', after.get('error'))}"
        )
    print(f"{queued} of 4 turns were aborted before a token; {stuck} of 4 sessions never took another turn")
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
