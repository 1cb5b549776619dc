#!/usr/bin/env python3
"""SGLang PR 40252: a session's turn is aborted while it may wait retracted in the queue; the turn after it.

usage: python sglang_40252.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import json
import random
import sys
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


def aborted(session: str, rid: str, when: int) -> tuple[int, str]:
    """A turn of 200 tokens, aborted when it has shown `when`; the tokens that it showed, and how it ended."""
    shown, end = 0, ""
    request = body(ids(24), 200, session, stream=True, rid=rid)
    with requests.post(BASE + "/generate", json=request, stream=True, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                shown = max(shown, len(event["output_ids"]))
                end = (event["meta_info"]["finish_reason"] or {}).get("type", "")
                if len(event["output_ids"]) == when:
                    requests.post(BASE + "/abort_request", json={"rid": rid}, timeout=60)
    return shown, end


def main() -> int:
    """Start it with forced retraction every 3 steps."""
    kept = stopped = 0
    for attempt in range(6):
        pair = [open_session(), open_session()]
        with ThreadPoolExecutor(3) as pool:
            past = [16 + len(one["output_ids"]) for one in pool.map(lambda one: ask(ids(16), 8, one), pair)]
            beside = pool.submit(ask, ids(16), 120)
            rids = [f"turn-{attempt}-{at}-" for at in range(2)]
            shown = list(pool.map(aborted, pair, rids, (4 + attempt, 5 + attempt)))
            beside.result()
        for session, before, (tokens, end) in zip(pair, past, shown, strict=True):
            found = ask(ids(8), 4, session)["meta_info"].get("prompt_tokens")
            stopped += end == "abort"
            kept += end == "abort" and found != before + 8
            print(f"ended as {end} at {tokens} tokens; next prompt {found}, rolled back it is {before + 8}")
            close(session)
    print(f"{kept} of {stopped} aborted turns became history")
    return 1 if kept else 0


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
