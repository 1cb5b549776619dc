"""What each SGLang release has: which cells it can run, which checks and gauges it offers.

Read in the packages of 0.5.6, 0.5.10 to 0.5.15 and 0.5.23. A version that nobody could name ("") is let
through: a server that was attached to may be a fork whose version says nothing.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from pytest_kvcheck.cells import Cell, DeviceName

Release = tuple[int, int, int]

STREAMING_SESSIONS: Release = (0, 5, 10)
# Until then overlap chose the code: V2 with it, V1 without it or with topk > 1. From 0.5.13 on it is always V2.
V1_GONE: Release = (0, 5, 13)
MIXED_CHUNK_WITH_SPECULATION: Release = (0, 5, 19)  # 0.5.18 turns it off with a warning, 0.5.19 has it
SOUND_BUSY_CHECK: Release = (0, 5, 11)
POOL_GAUGES: Release = (0, 5, 11)
SWA_GAUGES: Release = (0, 5, 12)
TOPK_BUSY_CHECK: Release = (0, 5, 13)
PAGE_INVARIANTS: Release = (0, 5, 15)
# The CPU stand-in patches internals of exactly this release.
CPU_RELEASE: Release = (0, 5, 23)


def release(version: str) -> Release | None:
    """``0.5.12.post1`` -> (0, 5, 12); None where the text is no version or a build tool's ``0.0.0``."""
    hit = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version)
    number = (int(hit[1]), int(hit[2]), int(hit[3])) if hit else (0, 0, 0)
    return number if number > (0, 0, 0) else None


def unsupported(cell: Cell, device: DeviceName, version: str) -> str | None:
    """Why this release cannot run the cell, or None."""
    want, spec = cell.features, cell.features.speculative
    if want.chunked_prefill and want.chunked_prefill % want.page_size:
        return (
            f"SGLang needs a chunked_prefill that is a multiple of page_size, found {want.chunked_prefill} "
            f"and {want.page_size}"
        )
    if not want.prefix_cache and want.streaming_session:
        return "SGLang's streaming sessions run on the radix cache, so prefix_cache: false needs them off"
    if device == "cpu":
        if spec and spec.overlap and spec.version == "v2":
            return "SGLang on CPU cannot overlap scheduling with speculation; use overlap: false, or a GPU"
        if want.tp > 1:
            return f"the CPU stand-in runs one rank, found tp: {want.tp}"
    if want.mixed_chunk and spec and spec.algorithm.upper() not in ("EAGLE", "EAGLE3"):
        return f"SGLang has no mixed chunk with speculative algorithm {spec.algorithm}"

    have = release(version)
    if have is None:
        return None
    if device == "cpu" and have != CPU_RELEASE:
        return f"the CPU stand-in is made for SGLang 0.5.23, found {version}"
    if want.streaming_session and have < STREAMING_SESSIONS:
        return f"streaming sessions came with SGLang 0.5.10, found {version}"
    if want.streaming_session and spec and spec.version == "v2" and have < SOUND_BUSY_CHECK:
        return f"SGLang {version} refuses speculation V2 with sessions; it came with 0.5.11"
    if want.streaming_session and want.strict and have < SOUND_BUSY_CHECK:
        return f"the busy check of SGLang {version} counts lent session slots twice; set strict: false"
    if spec and spec.version == "v1" and have >= V1_GONE:
        return f"speculation V1 was removed from SGLang in 0.5.13, found {version}"
    by_v1 = spec and spec.algorithm.upper() != "NGRAM" and (not spec.overlap or spec.topk > 1)
    if spec and spec.version == "v2" and have < V1_GONE and by_v1:
        what = "topk > 1" if spec.overlap else "overlap: false"
        return f"SGLang {version} speculates by V1 where {what} is asked for; set version: v1"
    if want.mixed_chunk and spec and have < MIXED_CHUNK_WITH_SPECULATION:
        return f"SGLang {version} turns mixed chunk off under speculation"
    return None


def lacks(cell: Cell, version: str) -> dict[str, str]:
    """Checks and gauges that this release or this cell goes without, each with the reason."""
    have = release(version)
    out: dict[str, str] = {}
    if not cell.features.strict:
        off = "turned off by --kvcheck-silent" if cell.silent else "the cell says strict: false"
        out |= {"busy_check": off, "idle_check": off, "page_invariants": off}
    if not cell.features.streaming_session:
        out["sessions"] = "the cell runs without streaming sessions"
    if have is None:
        return out
    spec = cell.features.speculative
    if spec and spec.topk > 1 and have < TOPK_BUSY_CHECK:
        out["busy_check"] = f"the busy check of SGLang {version} skips speculation with topk > 1"
    if have < PAGE_INVARIANTS:
        out["page_invariants"] = f"came with SGLang 0.5.15, found {version}"
    if have < POOL_GAUGES:
        reason = f"came with SGLang 0.5.11, found {version}"
        out |= {"available": reason, "evictable": reason, "sessions": reason, "session_held": reason}
    if have < SWA_GAUGES:
        out["swa"] = f"the gauges of the sliding-window pool came with SGLang 0.5.12, found {version}"
    return out


def golden_gauges(version: str, *, swa: bool, sessions: bool) -> tuple[str, ...]:
    """Metric names (without ``sglang:``) that must be in ``/metrics`` after the first batch.

    Of an unknown version the newest list is asked for: a missing name is then reported, never passed over.
    """
    lists = _golden_lists()
    have = release(version)
    fitting = [number for number in lists if have is None or number <= have]
    wanted = []
    for line in lists[max(fitting or lists)]:
        name, _, condition = line.partition(" if ")
        if (condition == "swa" and not swa) or (condition == "sessions" and not sessions):
            continue
        wanted.append(name)
    return tuple(wanted)


@cache
def _golden_lists() -> dict[Release, tuple[str, ...]]:
    lists = {}
    for file in resources.files(__package__).joinpath("golden").iterdir():
        number = release(file.name.removeprefix("sglang-"))
        if file.name.startswith("sglang-") and number:
            lines = file.read_text(encoding="utf-8").splitlines()
            lists[number] = tuple(line for line in lines if line and not line.startswith("#"))
    return lists
