#!/usr/bin/env python3
"""What SGLang makes of the vocabulary's last id, and (asked for with --crash) of one outside it.

usage: python sglang_token_ids.py http://127.0.0.1:30000 VOCAB_SIZE [--crash]    (needs requests)
"""

from __future__ import annotations

import sys

import requests


def score(base: str, ids: list[int]) -> list[list[object]]:
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 1}
    reply = requests.post(base + "/generate", json=body, timeout=120)
    entries: list[list[object]] = reply.json()["meta_info"]["input_token_logprobs"]
    return entries


def main() -> int:
    base, vocabulary = sys.argv[1].rstrip("/"), int(sys.argv[2])
    wrong = 0
    for token in (vocabulary - 2, vocabulary - 1):
        logprob, echoed, _ = score(base, [5, 6, token, 7])[2]
        wrong += echoed != token
        print(f"sent {token}, echoed {echoed}, log-prob {logprob}")
    if "--crash" in sys.argv:
        try:
            print("outside the vocabulary:", score(base, [vocabulary + 100]))
        except (requests.RequestException, ValueError, KeyError) as error:
            wrong += 1
            print("outside the vocabulary:", type(error).__name__)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
