#!/usr/bin/env python3
"""SGLang issue 23392: cancels on a shared prefix at 15 and 19 ms, beside unrelated requests.

usage: python sglang_23392.py http://127.0.0.1:30000    (needs requests; see the page beside this)
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


def logprobs(prompt: list[int]) -> list[float]:
    meta = ask(prompt, 32, return_logprob=True)["meta_info"]
    return [one[0] for one in meta["output_token_logprobs"]]


def main() -> int:
    bystanders = [ids(40 + at) for at in range(4)]
    answers = [logprobs(one) for one in bystanders]
    requests.post(BASE + "/flush_cache", timeout=60)
    again = [logprobs(one) for one in bystanders]
    noise = max(
        abs(a - b) for one, two in zip(answers, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    worst = 0.0
    with ThreadPoolExecutor(16) as pool:
        for attempt in range(15):
            prefix = ids(128)
            work = []
            for at, delay in enumerate((0.015, 0.019) * 3):
                rid = f"cancel-{attempt}-{at}-"
                work.append(pool.submit(ask, prefix + ids(8), 64, rid=rid))
                time.sleep(delay)
                requests.post(BASE + "/abort_request", json={"rid": rid}, timeout=60)
            now = list(pool.map(logprobs, bystanders))
            for one, two in zip(answers, now, strict=True):
                worst = max(worst, *(abs(a - b) for a, b in zip(one, two, strict=True)))
            [one.result() for one in work]
    print(
        f"60 bystanders in 15 bursts: log-probs off by at most {worst:.1e} (alone, cold and warm: {noise:.1e})"
    )
    return 1 if worst > max(0.2, 10 * noise) else 0


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
