#!/usr/bin/env python3
"""What SGLang makes of the vocabulary's last id, and (asked for with --crash) of one outside it.

usage: python sglang_token_ids.py http://127.0.0.1:30000 [VOCAB_SIZE, else 512] [--crash]    (needs requests)
exit: 1 while a fault is there, 0 when none is, 2 without a server
"""

from __future__ import annotations

import sys

import requests

ARGUMENTS = [one for one in sys.argv[1:] if one != "--crash"]
BASE = ARGUMENTS[0].rstrip("/") if ARGUMENTS else ""
VOCABULARY = int(ARGUMENTS[1]) if len(ARGUMENTS) > 1 else 512


def score(ids: list[int]) -> requests.Response:
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 1}
    return requests.post(BASE + "/generate", json=body, timeout=120)


def main() -> int:
    wrong = 0
    for token in (VOCABULARY - 2, VOCABULARY - 1):
        logprob, echoed, _ = score([5, 6, token, 7]).json()["meta_info"]["input_token_logprobs"][2]
        wrong += echoed != token
        print(f"sent {token}, echoed {echoed}, log-prob {logprob}")
    if "--crash" in sys.argv:
        try:
            status = score([VOCABULARY + 100]).status_code
            after = score([5, 6, 7]).status_code
            print(f"outside the vocabulary: HTTP {status}; a good request behind it: HTTP {after}")
            wrong += not 400 <= status < 500 or after != 200
        except requests.RequestException as error:
            print(f"outside the vocabulary: {type(error).__name__}, the server is gone")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        requests.get(BASE + "/server_info", timeout=60)
    except requests.RequestException:
        print(f"no server at {BASE or 'the URL, none was given'}")
        sys.exit(2)
    sys.exit(main())
