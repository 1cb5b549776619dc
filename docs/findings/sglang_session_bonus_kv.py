#!/usr/bin/env python3
"""Second turns of a streaming session under EAGLE against the same tokens in one prompt.

usage: python sglang_session_bonus_kv.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import requests

BASE = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""


def post(path: str, body: dict[str, Any]) -> requests.Response:
    reply = requests.post(BASE + path, json=body, timeout=300)
    reply.raise_for_status()
    return reply


def flush() -> None:
    """It is refused until the close has come through."""
    until = time.monotonic() + 30
    while requests.post(BASE + "/flush_cache", json={}, timeout=60).status_code != 200:
        if time.monotonic() > until:
            print("the cache could not be flushed for 30 s: something else runs on this server")
            sys.exit(2)
        time.sleep(0.2)


def generate(ids: list[int], new: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}
    answer: dict[str, Any] = post("/generate", body).json()
    return answer


def main() -> int:
    rng = random.Random(0)
    wrong = 0
    for first_turn in range(16, 28):
        session = post("/open_session", {"capacity_of_str_len": 100000, "streaming": True}).json()
        history = [rng.randrange(3, 512) for _ in range(40)]
        one = generate(history, first_turn, session_params={"id": session})
        history += one["output_ids"] + [rng.randrange(3, 512) for _ in range(8)]
        two = generate(history[-8:], 24, session_params={"id": session})
        post("/close_session", {"session_id": session})
        flush()
        again = generate(history + two["output_ids"], 1, logprob_start_len=len(history) - 1)
        wanted = [entry[0] for entry in again["meta_info"]["input_token_logprobs"]][-24:]
        found = [entry[0] for entry in two["meta_info"]["output_token_logprobs"]]
        # histogram[i]: rounds that accepted i drafts and so gave i + 1 tokens; prefill gave the first one
        histogram = one["meta_info"]["spec_correct_drafts_histogram"]
        made = 1 + sum((i + 1) * rounds for i, rounds in enumerate(histogram))
        last = "bonus" if made == first_turn else "draft"
        worst = max(abs(a - b) for a, b in zip(wanted, found, strict=True))
        wrong += worst > 0.1
        print(
            f"turn 1: {first_turn} tokens, last one a {last}; turn 2: {two['meta_info']['cached_tokens']} "
            f"cached of {40 + first_turn}, log-probs off by up to {worst:.1e}"
        )
    print(f"{wrong} of 12 second turns are off by more than 0.1")
    return 1 if wrong else 0


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
