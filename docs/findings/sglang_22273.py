#!/usr/bin/env python3
"""SGLang PR 22273: turns that are too long must be refused and leave the session's KV as it was.

usage: python sglang_22273.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

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


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


def main() -> int:
    """Start it with a context of 512; each over-length turn has 600 new tokens and must be refused."""
    faults = []
    sessions = [open_session() for _ in range(4)]
    history = dict.fromkeys(sessions, 0)

    def turn(session: str) -> str:
        answer = ask(ids(16), 4, session)
        meta, before = answer["meta_info"], history[session]
        history[session] = before + 20
        if meta.get("prompt_tokens") != before + 16 or not before - 1 <= meta["cached_tokens"] <= before:
            return f"prompt {meta.get('prompt_tokens')} cached {meta.get('cached_tokens')}, history {before}"
        return ""

    def refused(session: str) -> str:
        answer = ask(ids(600), 4, session)
        kind = answer["meta_info"].get("finish_reason", {}).get("type", "abort")
        return "" if kind == "abort" else f"600 tokens into a context of 512 finished as {kind}"

    with ThreadPoolExecutor(6) as pool:
        for _ in range(8):
            plain = [pool.submit(ask, ids(24), 4) for _ in range(2)]
            faults += list(pool.map(turn, sessions))
            faults += [] if all(one.result()["status"] == 200 for one in plain) else ["a plain request failed"]
            faults += list(pool.map(refused, sessions))
            faults += list(pool.map(turn, sessions))
    for session in sessions:
        close(session)
    ask(ids(4), 2)
    faults = [fault for fault in faults if fault]
    print("\n".join(faults[:8]) or "32 over-length turns refused, 64 turns around them exact, the server lives")
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
