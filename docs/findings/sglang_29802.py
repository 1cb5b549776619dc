#!/usr/bin/env python3
"""SGLang PR 29802 and issue 20451: a request goes on from an earlier one's prompt and output; what was cached.

usage: python sglang_29802.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def main() -> int:
    page = int(requests.get(BASE + "/server_info", timeout=60).json()["page_size"])
    faults = []
    for size, new in ((64, 64), (300, 100), (1200, 200)):
        first = ids(size)
        one = ask(first, new)
        two = ask(first + one["output_ids"] + ids(8), 4)
        cached, whole = two["meta_info"].get("cached_tokens", 0), (size + new - 1) // page * page
        print(f"prompt {size} and output {new}: {cached} of {size + new} cached, expected {whole} at least")
        if cached < whole - page:
            faults.append(size)
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
