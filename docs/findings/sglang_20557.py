#!/usr/bin/env python3
"""SGLang PRs 20557 and 20955: log-probs of the prompt (logprob_start_len 0) asked for in a session's turns.

usage: python sglang_20557.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def main() -> int:
    modes = [{}, {"return_logprob": True}, {"return_logprob": True, "logprob_start_len": 0}]
    faults = []
    sessions = [open_session() for _ in range(4)]
    history: dict[str, list[int]] = {session: [] for session in sessions}
    told: list[tuple[list[int], list[float]]] = []

    def turn(session: str, at: int, mode: dict[str, Any]) -> str:
        new, before = ids(120), len(history[session])
        answer = ask(new, 16, session, **mode)
        meta = answer["meta_info"]
        history[session] += new + answer["output_ids"]
        if meta.get("prompt_tokens") != before + 120 or not before - 1 <= meta["cached_tokens"] <= before:
            return (
                f"turn {at}: prompt {meta.get('prompt_tokens')}, cached {meta.get('cached_tokens')} of {before}"
            )
        if mode:
            told.append((list(history[session]), [one[0] for one in meta["output_token_logprobs"]]))
        return ""

    with ThreadPoolExecutor(4) as pool:
        for at in range(5):
            faults += list(pool.map(turn, sessions, [at] * 4, [modes[(at + one) % 3] for one in range(4)]))
    for session in sessions:
        close(session)
    requests.post(BASE + "/flush_cache", timeout=60)
    worst = 0.0
    for whole, logprobs in told:
        again = ask(whole, 1, return_logprob=True, logprob_start_len=0)
        wanted = [one[0] for one in again["meta_info"]["input_token_logprobs"]][-16:]
        worst = max(worst, *(abs(a - b) for a, b in zip(wanted, logprobs, strict=True)))
    faults = [fault for fault in faults if fault]
    faults += [f"log-probs off by up to {worst:.1e}"] if worst > 0.2 else []
    print("\n".join(faults) or f"20 turns exact; {len(told)} replayed, log-probs off by at most {worst:.1e}")
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
