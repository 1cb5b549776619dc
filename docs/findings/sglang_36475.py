#!/usr/bin/env python3
"""SGLang issue 36475: a client leaves in the middle of a session's turn and asks for the next turn at once.

usage: python sglang_36475.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def leave(request: dict[str, Any]) -> None:
    """Send it and hang up: after the first event of a stream, else after half a second."""
    try:
        with requests.post(BASE + "/generate", json=request, stream=True, timeout=(5, 0.5)) as reply:
            next(reply.iter_lines())
    except requests.Timeout:
        pass


def left_turn(stream: bool, pause: float) -> list[str]:
    faults = []
    session = open_session()
    ask(ids(512), 48, session)
    leave(body(ids(64), 1024, session, stream=stream))
    told = []
    for turn in range(40):
        try:
            answer = ask(ids(64), 8, session)
        except requests.RequestException as error:
            faults.append(f"turn {turn}: {type(error).__name__}, the server is gone")
            break
        meta = answer["meta_info"]
        told.append((answer["status"], meta.get("prompt_tokens"), meta.get("cached_tokens")))
        if answer["status"] == 200 and meta["prompt_tokens"] != 512 + 48 + 64:
            faults.append(f"turn {turn}: HTTP 200 for a prompt of {meta['prompt_tokens']} tokens, 624 expected")
        if answer["status"] == 200:
            break
        time.sleep(pause)
    how = "streamed" if stream else "not streamed"
    print(f"{how}, asked again every {pause} s (HTTP status, prompt_tokens, cached_tokens): {told}")
    return faults


def main() -> int:
    for stream, pause in ((True, 0.5), (True, 0.0), (True, 0.0), (False, 4.0), (False, 0.25), (False, 0.25)):
        faults = left_turn(stream, pause)
        if faults:
            print("\n".join(faults))
            return 1
        time.sleep(1)
    print("every turn after leaving was refused, or went on from the last finished one")
    return 0


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
