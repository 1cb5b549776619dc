#!/usr/bin/env python3
"""SGLang PR 22790: turns aborted in mid-decode, first or later, or refused; what the next turn inherits.

usage: python sglang_22790.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
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


def aborted(session: str, rid: str) -> str:
    """A turn of 400 tokens, aborted when it has shown some."""
    streamed = body(ids(24), 400, session, stream=True, rid=rid)
    lines = []
    with requests.post(BASE + "/generate", json=streamed, stream=True, timeout=60) as reply:
        for line in reply.iter_lines():
            lines.append(line)
            if len(lines) == 6:
                requests.post(BASE + "/abort_request", json={"rid": rid}, timeout=60)
    return "abort" if any(b'"abort"' in line for line in lines) else "ran to its end"


def main() -> int:
    faults = []
    for attempt in range(6):
        for before in (0, 2):
            session, history = open_session(), 0
            for _ in range(before):
                history += 16 + len(ask(ids(16), 8, session)["output_ids"])
            how = aborted(session, f"aborted-{attempt}-{before}")
            if before:
                parameters = {"id": session, "offset": 1}
                refused = ask(ids(8), 4, session_params=parameters)
                faults += ["an offset was taken"] if refused["output_ids"] else []
            meta = ask(ids(16), 8, session)["meta_info"]
            said = f"{how} after {before} turns; next: prompt {meta.get('prompt_tokens')} of {history + 16}"
            if how != "abort" or meta.get("prompt_tokens") != history + 16:
                faults.append(said)
            close(session)
    print(
        "\n".join(faults)
        or "12 aborted turns, 6 refused ones: each next turn inherits exactly the finished ones"
    )
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
