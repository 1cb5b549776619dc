"""SGLang's log lines, old and new, and the noise that must not be mistaken for them."""

from __future__ import annotations

import pytest

from pytest_kvcheck.engines.sglang_logs import RULES
from pytest_kvcheck.observe.logs import LogEvent, match_line

FULL = "[full] total=2048, available=1990, evictable=1, protected=50, session_held=3, uncached=4"
SUMS = {"total": 2048, "available": 1990, "evictable": 1, "protected": 50, "session_held": 3, "uncached": 4}


def events(text: str) -> list[LogEvent]:
    return match_line(RULES, text, 1, 0.0)


@pytest.mark.parametrize(
    ("text", "rule", "kind", "fields"),
    [
        (f"ValueError: pool memory leak detected! {FULL}", "idle-pool", "K01", {"pool": "full", **SUMS}),
        (f"AssertionError: Full Pool Mem Leak Detected! {FULL}", "busy-full", "K01", {"pool": "full", **SUMS}),
        (f"AssertionError: SWA Pool Mem Leak Detected! {FULL.replace('full', 'swa')}", "busy-swa", "K14", {}),
        ("AssertionError: Mem Leak Detected! total_tokens=90 vs self.max_total_num_tokens=100", "busy-old",
         "K01", {"accounted": 90, "total": 100}),
        ("token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=2048, "
         "available_size=2000, evictable_size=8, protected_size=0", "idle-old", "K01", {"total": 2048}),
        ("ValueError: req_to_token_pool memory leak detected!available_size=14, session_held=1, total_size=16",
         "idle-rows", "K11", {"available": 14, "session_held": 1, "total": 16}),
        ("req_to_token_pool memory leak detected!available_size=14, total_size=16", "idle-rows", "K11", {}),
        ("ValueError: pool-bytes memory leak detected! 17 bytes", "idle-bytes", "K01", {}),
        ("ValueError: KV double free: sub-pool 0 has 3 duplicate pages.", "double-free", "K12", {"pages": 3}),
        ("ValueError: KV page use-after-free: 2 owner page refs are in the free pool, sample pages=[7].",
         "use-after-free", "K13", {"pages": 2}),
        ("kv_canary violation: launch_tag=ab fail_reason=token+position slot_idx=4", "canary", "K13",
         {"fail_reason": "token+position"}),
    ],
)  # fmt: skip
def test_each_verdict_of_the_engine_is_one_leak(
    text: str, rule: str, kind: str, fields: dict[str, object]
) -> None:
    found = [event for event in events(text) if event.meaning == "leak"]
    assert [(event.rule, event.kind) for event in found] == [(rule, kind)]
    assert fields.items() <= found[0].fields.items()


@pytest.mark.parametrize(
    "text",
    [
        "nanobind: leaked 4 instances!",
        ' - leaked instance 0x7f66dc6be1e8 of type "triton._C.libtriton.ir.attribute"',
        '    assert not full_leak, f"Full Pool Mem Leak Detected! {full_msg}"',
        '    self._report_leak("pool", "\\n".join(messages))',
        '  File "invariant_checker.py", line 454, in _report_leak',
        "Failed to freeze_gc: Traceback (most recent call last):",
        f"Scheduler debug info:\n{FULL}",
        FULL,
        "Testing retraction. #retracted_reqs: 0, #new_tokens_gained: 0",
        "Decode batch, #running-req: 1, #token: 112, token usage: 0.05, cpu graph: False",
        "[Mem Check (BUSY)] [swa] unified ring (leak-check skipped): available=1, evictable=2, total=3",
    ],
)
def test_noise_and_source_lines_say_nothing(text: str) -> None:
    assert events(text) == []


def test_a_busy_line_is_one_account_a_pool() -> None:
    one = events(f"[2026-12-01 21:37:06] [Mem Check (BUSY)] {FULL}")
    assert [(event.meaning, event.fields["pool"]) for event in one] == [("account", "full")]
    assert SUMS.items() <= one[0].fields.items()
    both = events(f"[Mem Check (BUSY)] {FULL}, {FULL.replace('full', 'swa')}")
    assert [event.fields["pool"] for event in both] == ["full", "swa"]


def test_the_busy_line_of_old_releases() -> None:
    line = "[Mem Check (BUSY)] available_size=90, evictable_size=5, protected_size=4, uncached_size=1"
    (event,) = events(line)
    assert event.fields == {"available": 90, "evictable": 5, "protected": 4, "uncached": 1}


@pytest.mark.parametrize(
    ("text", "meaning", "fields"),
    [
        ("KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 64", "retract",
         {"count": 2}),
        ("Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 0", "retract", {"count": 1}),
        ("Session opened: kv-1 (active=3)", "session", {"session": "kv-1", "active": 3}),
        ("Session KV released: kv-1 (497 tokens freed)", "session", {"session": "kv-1", "tokens": 497}),
        ("Session closed: kv-1 (active=0)", "session", {"active": 0}),
        ("Deferring session close for kv-1 (unfinished request)", "session", {"session": "kv-1"}),
        ("Deferred close ready for session kv-1, releasing.", "session", {"session": "kv-1"}),
        ("Session kv-1 timed out, closing.", "session", {"session": "kv-1"}),
        ("Scheduler hit an exception: Traceback (most recent call last):", "fatal", {}),
        ("SIGQUIT received. signum=None, frame=None. It usually means one child failed.", "fatal", {}),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300)", "fatal", {}),
    ],
)  # fmt: skip
def test_what_explains(text: str, meaning: str, fields: dict[str, object]) -> None:
    (event,) = events(text)
    assert event.meaning == meaning
    assert fields.items() <= event.fields.items()
