#!/usr/bin/env python3
"""SGLang PR 23441: streamed requests with log-probs are retracted; does any stream break, or lose a log-prob?

usage: python sglang_23441.py http://127.0.0.1:30000    (needs requests; see the page beside this)
exit: 1 while the fault is there, 0 when it is not, 2 without a server
"""

from __future__ import annotations

import json
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


def stream(prompt: list[int]) -> tuple[int, int, int, bool]:
    """Tokens, log-probs and retractions of one stream, and whether it came to its end mark."""
    request = body(prompt, 48, stream=True, return_logprob=True, top_logprobs_num=2)
    tokens = logprobs = retracted = 0
    ended = False
    with requests.post(BASE + "/generate", json=request, stream=True, timeout=120) as reply:
        for line in reply.iter_lines():
            ended = ended or line == b"data: [DONE]"
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                meta = event.get("meta_info", {})
                tokens = len(event.get("output_ids", []))
                logprobs = len([one for one in meta.get("output_token_logprobs", []) if one[0] is not None])
                retracted = meta.get("num_retractions", 0)
    return tokens, logprobs, retracted, ended


def main() -> int:
    """Start it with forced retraction."""
    with ThreadPoolExecutor(12) as pool:
        told = list(pool.map(stream, [ids(8 + at % 9) for at in range(96)]))
    wrong = [one for one in told if one[:2] != (48, 48) or not one[3]]
    print(f"96 streams, {sum(one[2] for one in told)} retractions; not whole: {wrong or 'none'}")
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
