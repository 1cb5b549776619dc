"""A turn that is sent while another one of its session runs: planned on purpose only, and never to be run."""

from __future__ import annotations

import msgspec
import pytest
from oracle_helpers import facts_of, make_cell

from pytest_kvcheck.operations import OVERLAP, Operation
from pytest_kvcheck.oracles.protocol import judge_protocol
from pytest_kvcheck.trace import OpRecord, Reply
from pytest_kvcheck.workloads import make_plan, why_not
from pytest_kvcheck.workloads.plan import check_plan

OPEN = Operation(id=0, kind="open", session="s")
RUNNING = Operation(id=1, kind="turn", after=(0,), session="s", input_ids=(11, 12), max_new_tokens=64)
BESIDE = Operation(
    id=2,
    kind="turn",
    after=(0,),
    session="s",
    input_ids=(13,),
    max_new_tokens=4,
    expect="reject",
    invalid=OVERLAP,
    target=1,
    when_tokens=1,
)


def test_the_plan_sends_turns_into_running_ones() -> None:
    plan = make_plan("overlapping-turn", make_cell(), vocab_size=512, seed=0)
    beside = [op for op in plan.operations if op.invalid == OVERLAP]
    assert len(beside) == 12
    for op in beside:
        assert op.expect == "reject"
        assert op.target is not None
        assert op.target not in op.after
        assert plan.operations[op.target].session == op.session
    assert why_not("overlapping-turn", make_cell(streaming_session=False)) is not None


@pytest.mark.parametrize("broken", [{"target": None}, {"expect": "finish"}, {"invalid": None}])
def test_two_turns_at_once_are_planned_on_purpose_only(broken: dict[str, str | None]) -> None:
    check_plan([OPEN, RUNNING, BESIDE])
    with pytest.raises(ValueError, match=r"operation 2 \(turn ''\): expected"):
        check_plan([OPEN, RUNNING, msgspec.structs.replace(BESIDE, **broken)])


def _records(finish: str, ended: float, shown: int | None = 1) -> list[OpRecord]:
    first = Reply(http_status=200, finish="length", output_ids=[5] * 64, completion_tokens=64)
    done = finish == "length"
    second = Reply(
        http_status=200 if done else 400,
        finish=finish,  # type: ignore[arg-type]
        output_ids=[6] * 4 if done else [],
        message="" if done else "Streaming session already has an active request.",
    )
    return [
        OpRecord(op=RUNNING, started=1.0, first_token=1.1, ended=5.0, reply=first),
        OpRecord(op=BESIDE, started=2.0, ended=ended, shown_at_action=shown, reply=second),
    ]


def test_a_second_turn_that_runs_beside_the_first_is_found() -> None:
    (found,) = judge_protocol(facts_of(_records("length", ended=3.0)))
    assert found.kind == "K07"
    assert "a second turn of a session" in found.headline


@pytest.mark.parametrize(
    "records",
    [
        _records("rejected", ended=2.1),  # as it should be
        _records("length", ended=5.5),  # it may have met the first one ended
        _records("length", ended=3.0, shown=None),  # it did
    ],
)
def test_a_refusal_and_a_late_second_turn_are_no_fault(records: list[OpRecord]) -> None:
    assert judge_protocol(facts_of(records)) == []
