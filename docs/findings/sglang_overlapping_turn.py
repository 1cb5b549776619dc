#!/usr/bin/env python3
"""SGLang: a session's turn runs and a second one is refused; is a third refused too, while the first runs on?

usage: python sglang_overlapping_turn.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import json
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


def main() -> int:
    session = open_session()
    ask(ids(64), 16, session)
    streamed = body(ids(16), 600, session, stream=True)
    told = []
    with requests.post(BASE + "/generate", json=streamed, stream=True, timeout=120) as reply:
        lines = reply.iter_lines()
        next(lines)
        for overlapping in range(3):
            answer = ask(ids(8), 4, session, timeout=20)
            meta = answer["meta_info"]
            told.append((answer["status"], meta.get("prompt_tokens"), meta.get("cached_tokens")))
            print(f"overlapping turn {overlapping + 1} (HTTP status, prompt_tokens, cached_tokens): {told[-1]}")
        last = b""
        for line in lines:
            last = line if line.startswith(b"data: {") else last
    end = json.loads(last.removeprefix(b"data: "))["meta_info"]
    print("the running turn:", end["finish_reason"], end["completion_tokens"], "tokens")
    after = ask(ids(8), 4, session)["meta_info"]
    expected = 64 + 16 + 16 + 600 + 8
    print(f"the turn behind it: prompt {after.get('prompt_tokens')}, expected {expected}")
    taken = [status for status, _, _ in told if status == 200]
    return 1 if taken or after.get("prompt_tokens") != expected else 0


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
