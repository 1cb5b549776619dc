#!/usr/bin/env python3
"""SGLang: a session's first turn has a prompt of one token and is retracted before its first answer token.

usage: python sglang_one_token_retracted.py http://127.0.0.1:30000    (needs requests; see its page)
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


def post(path: str, wanted: dict[str, Any]) -> Any:
    reply = requests.post(BASE + path, json=wanted, timeout=120)
    return reply.json() if reply.content else None


def ask(prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
    answer: dict[str, Any] = post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})
    return answer


def first_turn(size: int, new: int) -> bool:
    """Whether a session's first turn of `size` tokens was answered whole, while another request decodes."""
    session = post("/open_session", {"capacity_of_str_len": 1 << 20, "streaming": True})
    answer = ask(ids(size), new, session_params={"id": session})
    post("/close_session", {"session_id": session})
    return len(answer.get("output_ids", [])) == new


def main() -> int:
    """Start it with forced retraction every 3 steps."""
    for size in (2, 1):
        whole = 0
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(ask, ids(16), 3000)
            try:
                while not beside.done() and whole < 40:
                    whole += first_turn(size, 4 + whole % 3)  # not always the same step of three
                beside.result()
            except requests.RequestException as error:
                print(
                    f"{type(error).__name__} after {whole} first turns of {size} token(s), the server is gone"
                )
                return 1
        print(f"first turns of {size} token(s): {whole} answered whole")
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
