"""Plans for engines that keep no sessions: a history is sent again, and only its whole pages are cached."""

from __future__ import annotations

import pytest
from vllm_helpers import cell

from pytest_kvcheck.cells import Speculative
from pytest_kvcheck.ledger import SessionLedger
from pytest_kvcheck.trace import OpRecord, Reply
from pytest_kvcheck.workloads import make_plan


@pytest.mark.parametrize("page", [32, 256])
@pytest.mark.parametrize("name", ["kv-inheritance", "nth-mid-abort", "first-mid-abort", "pre-abort"])
def test_a_session_fills_a_page_before_its_last_turn(name: str, page: int) -> None:
    plan = make_plan(name, cell(page_size=page, pool_tokens=32768), vocab_size=512, seed=1, sessions="resent")
    assert "cached_turn" in plan.must_exercise
    ledgers: dict[str, SessionLedger] = {}
    reached = False
    for op in plan.operations:
        if op.kind == "turn" and op.session and op.expect == "finish":
            ledger = ledgers.setdefault(op.session, SessionLedger(op.session))
            reached = reached or len(ledger.history) > page
            reply = Reply(finish="length", output_ids=[1] * op.max_new_tokens)
            ledger.apply(OpRecord(op=op, reply=reply))
    assert reached


@pytest.mark.parametrize("page", [1, 256])
@pytest.mark.parametrize("name", ["kv-inheritance", "nth-mid-abort", "first-mid-abort", "pre-abort"])
def test_with_a_draft_it_fills_one_more_that_is_computed_anew(name: str, page: int) -> None:
    one = cell(page_size=page, pool_tokens=32768, speculative=Speculative(overlap=False), draft="/models/draft")
    plan = make_plan(name, one, vocab_size=512, seed=1, sessions="resent")
    first = next(op for op in plan.operations if op.kind == "turn" and op.expect != "reject")
    assert len(first.input_ids) > 2 * max(page, 32)
    assert "cached_turn" in plan.must_exercise


def test_without_a_prefix_cache_no_cached_turn_is_demanded() -> None:
    one = cell(page_size=32, pool_tokens=32768, prefix_cache=False)
    plan = make_plan("nth-mid-abort", one, vocab_size=512, seed=1, sessions="resent")
    assert plan.must_exercise == ("abort_mid_decode",)


def test_sessions_of_the_server_keep_their_short_turns() -> None:
    plan = make_plan("kv-inheritance", cell(page_size=256, pool_tokens=32768), vocab_size=512, seed=1)
    assert [len(op.input_ids) for op in plan.operations if op.kind == "turn"] == [24, 8, 8]
    assert "cached_turn" in plan.must_exercise


def test_what_cannot_be_cached_is_not_demanded() -> None:
    small = cell(page_size=256, pool_tokens=32768, max_running=4)
    plan = make_plan("row-starvation", small, vocab_size=512, seed=1, sessions="resent")
    assert "cached_turn" not in plan.must_exercise
    nothing = cell(page_size=32, pool_tokens=32768, prefix_cache=False)
    plan = make_plan("kv-inheritance", nothing, vocab_size=512, seed=1, sessions="resent")
    assert "cached_turn" not in plan.must_exercise
