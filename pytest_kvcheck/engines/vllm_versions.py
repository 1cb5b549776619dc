"""What each vLLM release has: which cells it can run, which gauges and checks it offers.

0.32.0 was run; older releases were read in the public sources and documentation. A version that nobody could
name ("") is let through: a server that was attached to may be a fork whose version says nothing.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from pytest_kvcheck.cells import Cell, DeviceName

Release = tuple[int, int, int]

# The first release whose completions carry the ids of their tokens (``return_token_ids``).
TOKEN_IDS: Release = (0, 10, 2)
# The first release read whose /reset_prefix_cache says whether it succeeded, with /abort_requests beside it.
RESET_VERDICT: Release = (0, 32, 0)
# The first release read that can tell a reply how many rounds of speculation it took.
VERIFY_STEPS: Release = (0, 32, 0)
# The first release read whose KV events say for whom a block was stored, by the ``session_id`` of the request.
EVENT_SESSIONS: Release = (0, 32, 0)

# The smallest block of tokens that the attention backends of a device take; larger ones are its multiples.
SMALLEST_BLOCK: dict[DeviceName, int] = {"cpu": 32, "cuda": 16}
METHODS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "NGRAM": "ngram"}


def release(version: str) -> Release | None:
    """``0.32.0.post1+cpu`` -> (0, 32, 0); None where the text is no version."""
    hit = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return (int(hit[1]), int(hit[2]), int(hit[3])) if hit else None


def block_size(page_size: int, device: DeviceName) -> int:
    """Tokens a block for a cell's ``page_size``: the default 1 stands for the smallest that the device has."""
    return SMALLEST_BLOCK[device] if page_size == 1 else page_size


def unsupported(cell: Cell, device: DeviceName, version: str) -> str | None:
    """Why this release cannot run the cell, or None."""
    want, spec, smallest = cell.features, cell.features.speculative, SMALLEST_BLOCK[device]
    have = release(version)
    if have is not None and have < TOKEN_IDS:
        return f"token ids in completions (return_token_ids) came with vLLM 0.10.2, found {version}"
    if want.page_size != 1 and want.page_size % smallest:
        return (
            f"vLLM on {device} has blocks of multiples of {smallest} tokens, found page_size: {want.page_size}"
        )
    if want.retract and want.max_running < 2:
        return f"vLLM preempts only with two running requests or more, found max_running: {want.max_running}"
    if want.tp > 1 and device == "cpu":
        return f"vLLM on CPU runs one rank here, found tp: {want.tp}"
    if spec is None:
        return None
    if spec.algorithm.upper() not in METHODS:
        return f"vLLM has no speculative algorithm {spec.algorithm}; this adapter knows {', '.join(METHODS)}"
    if spec.topk > 1:
        return f"vLLM drafts a chain, not a tree, found topk: {spec.topk}"
    if spec.version == "v1":
        return "vLLM has one speculative path; a cell with version: v2 covers it"
    if spec.overlap and device == "cpu":
        return "vLLM on CPU has no asynchronous scheduling; use overlap: false, or a GPU"
    if spec.algorithm.upper() != "NGRAM" and cell.model.draft is None:
        return f"speculative algorithm {spec.algorithm} needs model.draft, found none"
    return None


def lacks(cell: Cell, version: str, sessions: bool = False) -> dict[str, str]:
    """Checks and gauges that vLLM, this release or this cell goes without, each with the reason.

    ``sessions``: the server keeps them itself (streaming input).
    """
    held = "vLLM does not tell which used blocks are a session's"
    ours = "sessions are the client's: nothing is held between turns"
    out = {
        "busy_check": "vLLM has no check of its own while it runs",
        "idle_check": "vLLM checks its pool only when POST /reset_prefix_cache asks, which the account does",
        "page_invariants": "vLLM has none; a double free shows as an assertion that ends the engine core",
        "available": "free blocks and evictable blocks are one number in vLLM",
        "evictable": "free blocks and evictable blocks are one number in vLLM",
        "protected": "vLLM tells used blocks only",
        "session_held": held if sessions else ours,
        "sessions": held if sessions else ours,
        "retractions": "vLLM counts preemptions of the engine (num_preemptions), not of one request",
    }
    if sessions:
        # So log-probs alone tell whether the history of such a turn is right.
        out["cached_turn"] = (
            "vLLM counts no prompt and no cached tokens of a turn that follows on a streaming session's KV"
        )
    elif cell.features.retract is not None:
        out["cached_turn"] = (
            "each forced preemption empties vLLM's prefix cache, so a turn may find nothing in it"
        )
    have = release(version)
    if have is not None and have < RESET_VERDICT:
        out["reset_verdict"] = (
            f"not known of vLLM {version}: its /reset_prefix_cache may not say if it succeeded"
        )
    if cell.features.speculative and have is not None and have < VERIFY_STEPS:
        out["speculation"] = f"not known of vLLM {version}: its replies may not tell rounds of speculation"
    return out


def golden_gauges(version: str) -> tuple[str, ...]:
    """Names (without ``vllm:``) that must be in ``/metrics`` once the server is up.

    Of an unknown version the newest list is asked for: a missing name is then reported, never passed over.
    """
    lists = _golden_lists()
    have = release(version)
    fitting = [number for number in lists if have is None or number <= have]
    return lists[max(fitting)] if fitting else lists[min(lists)]


@cache
def _golden_lists() -> dict[Release, tuple[str, ...]]:
    lists = {}
    for file in resources.files(__package__).joinpath("golden").iterdir():
        number = release(file.name.removeprefix("vllm-"))
        if file.name.startswith("vllm-") and number:
            lines = file.read_text(encoding="utf-8").splitlines()
            lists[number] = tuple(line for line in lines if line and not line.startswith("#"))
    return lists
