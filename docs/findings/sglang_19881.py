#!/usr/bin/env python3
"""SGLang PR 19881: one request decodes until the pool is full, and there is nobody else to retract.

usage: python sglang_19881.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def load() -> dict[str, Any]:
    """The scheduler's own numbers, fresh also at rest."""
    reply = requests.get(BASE + "/v1/loads?include=all", timeout=60)
    told: dict[str, Any] = reply.json()["loads"][0]
    return told


def main() -> int:
    """Start it with a pool smaller than the context; the request asks for more than the pool holds."""
    total = int(load()["max_total_num_tokens"])
    for attempt in range(3):
        answer = ask(ids(100), total + 50, timeout=200)
        meta = answer["meta_info"]
        print(
            f"a prompt of 100 and {total + 50} new tokens in a pool of {total}: HTTP {answer['status']}, "
            f"{len(answer['output_ids'])} tokens, {meta.get('finish_reason', answer.get('error'))}"
        )
        after = ask(ids(32 + attempt), 8, timeout=30)
        if after["status"] != 200 or len(after["output_ids"]) != 8:
            print("a small request behind it failed:", after)
            return 1
    print("the server lives and serves")
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
