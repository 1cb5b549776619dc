"""A leak beside preemptions that the engine counts without saying of which requests."""

from __future__ import annotations

from oracle_helpers import facts_of, gauges, sample

from pytest_kvcheck.operations import Operation
from pytest_kvcheck.oracles.conservation import judge_conservation
from pytest_kvcheck.trace import OpRecord, Reply


def request(number: int, finish: str = "length") -> OpRecord:
    op = Operation(id=number, kind="generate", input_ids=(1,) * 40, max_new_tokens=8)
    reply = Reply(finish=finish, output_ids=[1] * 8)  # type: ignore[arg-type]
    return OpRecord(op=op, started=float(number), ended=number + 1.0, reply=reply)


def test_a_leak_of_a_run_that_preempted_is_laid_to_it() -> None:
    facts = facts_of(
        [request(1), request(2)],
        baseline=sample(retracted_total=3),
        idle=sample(gauges(used=672), retracted_total=24),
    )
    (found,) = judge_conservation(facts)
    assert found.kind == "K05"
    assert any("21 preemptions" in text for text in found.evidence)


def test_beside_aborts_it_is_one_suspicion_of_two() -> None:
    facts = facts_of(
        [request(1), request(2, "abort"), request(3, "abort")],
        baseline=sample(retracted_total=0),
        idle=sample(gauges(used=672), retracted_total=2),
    )
    (found,) = judge_conservation(facts)
    assert found.kind == "K03"
    assert "K05" in found.also


def test_without_preemptions_nothing_is_said_of_them() -> None:
    facts = facts_of(
        [request(1)], baseline=sample(retracted_total=5), idle=sample(gauges(used=672), retracted_total=5)
    )
    (found,) = judge_conservation(facts)
    assert "K05" not in (found.kind, *found.also)
