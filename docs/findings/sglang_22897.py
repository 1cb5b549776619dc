#!/usr/bin/env python3
"""SGLang PRs 22897 and 28754: speculated turns that end inside an accepted run; what the next turn inherits.

usage: python sglang_22897.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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
    faults, reused = [], 0
    for new in range(11, 19):
        session, history, shown = open_session(), 0, []
        for turn in range(3):
            answer = ask(ids(20), new, session)
            meta = answer["meta_info"]
            shown.append(meta.get("cached_tokens"))
            if meta.get("prompt_tokens") != history + 20 or len(answer["output_ids"]) != new:
                faults.append(f"{new} new, turn {turn}: prompt {meta.get('prompt_tokens')} of {history + 20}")
            if turn and not history - 1 <= meta.get("cached_tokens", -1) <= history:
                faults.append(f"{new} new, turn {turn}: cached {meta.get('cached_tokens')} of {history}")
            reused += turn > 0
            history += 20 + new
        print(f"{new} new tokens a turn: cached {shown}, accepted {meta.get('spec_correct_drafts_histogram')}")
        close(session)
    at_rest = account()
    missing = at_rest["max_total_num_tokens"] - at_rest["kv_available_tokens"] - at_rest["kv_evictable_tokens"]
    print("\n".join(faults) or f"{reused} later turns inherit all, or all but the last token")
    print(f"at rest {missing:.0f} tokens neither free nor evictable")
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
