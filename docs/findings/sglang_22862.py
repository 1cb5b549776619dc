#!/usr/bin/env python3
"""SGLang PR 22862 (and 22213, 20070): sessions side by side; what each turn inherits, and what is left at rest.

usage: python sglang_22862.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def close(session: str) -> None:
    requests.post(BASE + "/close_session", json={"session_id": session}, timeout=60).raise_for_status()


def account() -> dict[str, float]:
    """Pools and sessions at rest, from /metrics; a small request first, since gauges move only with a batch."""
    time.sleep(2)
    ask(ids(4), 8)
    time.sleep(1)
    lines = requests.get(BASE + "/metrics", timeout=60).text.splitlines()
    told = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("sglang:")}
    names = (
        "max_total_num_tokens",
        "kv_available_tokens",
        "kv_evictable_tokens",
        "streaming_session_held_tokens",
    )
    return {name: told[f"sglang:{name}"] for name in names if f"sglang:{name}" in told}


def main() -> int:
    """Start it with forced retraction, or with pages, or plain. First turns end at and beside a page's edge."""
    page = int(requests.get(BASE + "/server_info", timeout=60).json()["page_size"])
    faults, retracted = [], 0
    for first in (page, page + 1, 2 * page - 1, 40):
        sessions = [open_session() for _ in range(4)]
        history, before_that = dict.fromkeys(sessions, 0), dict.fromkeys(sessions, 0)
        with ThreadPoolExecutor(4) as pool:
            for turn in range(4):
                sizes = [first if not turn else 5 + at for at in range(4)]
                answers = list(pool.map(lambda one, size: ask(ids(size), 24, one), sessions, sizes))
                for session, size, answer in zip(sessions, sizes, answers, strict=True):
                    meta, before = answer["meta_info"], history[session]
                    again = meta.get("num_retractions", 0)
                    retracted += again
                    # A retracted turn leaves the next one less than all, and computes its own again.
                    whole = before - 1 <= meta.get("cached_tokens", -1) <= before
                    whole = whole or again or before_that[session] or not turn
                    if (
                        meta.get("prompt_tokens") != before + size
                        or not whole
                        or len(answer["output_ids"]) != 24
                    ):
                        told = f"prompt {meta.get('prompt_tokens')}, cached {meta.get('cached_tokens')}"
                        faults.append(f"first {first} turn {turn}: {told} of a history of {before}")
                    before_that[session] = again
                    history[session] = before + size + 24
        for session in sessions:
            close(session)
    at_rest = account()
    missing = at_rest["max_total_num_tokens"] - at_rest["kv_available_tokens"] - at_rest["kv_evictable_tokens"]
    print("\n".join(faults[:6]) or "64 turns inherit exactly what was shown")
    print(f"page {page}, {retracted} retractions; at rest {missing:.0f} tokens neither free nor evictable")
    return 1 if faults or missing else 0


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
