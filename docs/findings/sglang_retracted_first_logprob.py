#!/usr/bin/env python3
"""Many short requests with log-probs at once, under forced retraction: which replies lack a log-prob?

usage: python sglang_retracted_first_logprob.py http://127.0.0.1:30000    (needs requests)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

BASE = sys.argv[1].rstrip("/") if len(sys.argv) == 2 else ""


def ask(ids: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 16}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    reply = requests.post(BASE + "/generate", json=body, timeout=300)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer


def main() -> int:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 512) for _ in range(8)] for _ in range(160)]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, prompts))
    short = retracted = 0
    for reply in replies:
        meta = reply["meta_info"]
        times = meta.get("num_retractions", meta.get("total_retractions", 0))
        told = meta["output_token_logprobs"]
        retracted += times > 0
        if len(told) != len(reply["output_ids"]):
            short += 1
            print(
                f"{len(told)} log-probs for {len(reply['output_ids'])} tokens, retracted {times} times; "
                f"tokens {reply['output_ids'][:3]}..., log-probs of {[one[1] for one in told[:3]]}..."
            )
    print(f"{short} of {len(replies)} replies lack a log-prob; {retracted} were retracted")
    return 1 if short else 0


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
