"""Minimisation with probes that are predicates on plans: what is left is what the predicate needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_helpers import make_cell

from pytest_kvcheck.cells import Cell, Retract, Speculative
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.shrink import passes
from pytest_kvcheck.shrink.minimise import Budget, Minimised, Rate, minimise, same
from pytest_kvcheck.workloads import WORKLOADS, make_plan
from pytest_kvcheck.workloads.plan import check_plan

LEAK = Finding(kind="K03", oracle="conservation", status="leak", headline="40 tokens", pool="full")
Predicate = Callable[[Plan, Cell], bool]
BIG = make_cell(context_length=2048, chunked_prefill=128, page_size=16, pool_tokens=16384, strict=False)


def shrink(name: str, needs: Predicate, cell: Cell = BIG, **budget: float) -> Minimised:
    plan = make_plan(name, cell, vocab_size=512, seed=4)
    assert needs(plan, cell), "the whole plan must fail"

    def probe(candidate: Plan, where: Cell) -> list[Finding]:
        check_plan(candidate.operations)
        return [LEAK] if needs(candidate, where) else []

    made = minimise(plan, cell, LEAK, probe, budget=Budget(**{"probes": 400, "seconds": 60.0, **budget}))  # type: ignore[arg-type]
    assert made is not None
    assert needs(made.plan, made.cell)
    return made


def aborted_turns(plan: Plan) -> list[Operation]:
    requests = {op.id: op for op in plan.operations}
    found = [requests[op.target] for op in plan.operations if op.kind == "abort" and op.target is not None]
    return [op for op in found if op.kind == "turn"]


def test_one_aborted_turn_is_three_operations() -> None:
    made = shrink("nth-mid-abort", lambda plan, cell: bool(aborted_turns(plan)))
    assert [op.kind for op in made.plan.operations] == ["open", "turn", "abort"]
    turn = made.plan.operations[1]
    assert (len(turn.input_ids), turn.max_new_tokens) == (1, 1)
    assert made.operations_before > 30
    assert made.cell.features.page_size == 1
    assert (made.first, made.last) == (Rate(3, 3), Rate(3, 3))


def test_a_turn_after_an_abort_keeps_what_it_needs() -> None:
    def needs(plan: Plan, cell: Cell) -> bool:
        at = {op.id: place for place, op in enumerate(plan.operations)}
        return any(
            later.kind == "turn" and later.session == turn.session and at[later.id] > at[turn.id]
            for turn in aborted_turns(plan)
            for later in plan.operations
        )

    made = shrink("nth-mid-abort", needs)
    assert [op.kind for op in made.plan.operations] == ["open", "turn", "abort", "turn"]


def test_two_requests_at_once_stay_two_at_once() -> None:
    def needs(plan: Plan, cell: Cell) -> bool:
        before: dict[int, set[int]] = {}
        for op in plan.operations:
            before[op.id] = set(op.after).union(*(before[one] for one in op.after))
        asked = [op.id for op in plan.operations if op.generates]
        apart = ((one, two) for one in asked for two in asked if one < two)
        return any(one not in before[two] for one, two in apart)

    made = shrink("stress-concurrent", needs)
    assert made.operations <= 3
    assert needs(made.plan, made.cell)


def test_a_prompt_of_more_than_a_page_stays_as_long_as_that() -> None:
    made = shrink("stress-concurrent", lambda plan, cell: any(len(op.input_ids) > 16 for op in plan.operations))
    assert [len(op.input_ids) for op in made.plan.operations] == [17]


def test_only_features_that_matter_are_left() -> None:
    cell = replace(
        BIG, features=replace(BIG.features, retract=Retract(3), speculative=Speculative(), mixed_chunk=True)
    )
    made = shrink(
        "stress-concurrent", lambda plan, where: bool(plan.operations and where.features.retract), cell
    )
    left = made.cell.features
    assert left.retract == Retract(3)
    assert (left.speculative, left.mixed_chunk, left.page_size) == (None, False, 1)


def test_a_plan_that_asks_for_nothing_is_no_reproduction() -> None:
    made = shrink("nth-mid-abort", lambda plan, cell: True)
    assert [op.kind for op in made.plan.operations] == ["generate"]


def test_the_budget_ends_the_search_with_the_best_so_far() -> None:
    made = shrink("stress-concurrent", lambda plan, cell: bool(plan.operations), probes=8)
    assert made.exhausted
    assert made.operations < made.operations_before


def test_what_does_not_come_again_is_not_minimised() -> None:
    plan = make_plan("kv-inheritance", BIG, vocab_size=512, seed=1)
    assert minimise(plan, BIG, LEAK, lambda plan, cell: []) is None


def test_another_fault_is_not_taken_for_this_one() -> None:
    other = Finding(kind="K19", oracle="session_arithmetic", status="mismatch", headline="a count")
    plan = make_plan("nth-mid-abort", BIG, vocab_size=512, seed=1)

    def probe(candidate: Plan, where: Cell) -> list[Finding]:
        return [LEAK] if aborted_turns(candidate) else [other] if candidate.operations else []

    made = minimise(plan, BIG, LEAK, probe)
    assert made is not None
    assert made.finding == LEAK
    assert aborted_turns(made.plan)


def test_a_fault_that_shows_every_other_time_is_minimised_all_the_same() -> None:
    plan = make_plan("nth-mid-abort", BIG, vocab_size=512, seed=1)
    runs = iter(range(10_000))

    def probe(candidate: Plan, where: Cell) -> list[Finding]:
        return [LEAK] if next(runs) % 2 == 0 and aborted_turns(candidate) else []

    made = minimise(plan, BIG, LEAK, probe, budget=Budget(probes=600, seconds=60))
    assert made is not None
    assert made.operations <= 6
    assert 0 < made.first.seen < made.first.tried
    assert made.last.interval[0] < made.last.seen / made.last.tried < 1


def test_what_the_finding_points_to_is_tried_first_with_all_that_ran_beside_it() -> None:
    plan = make_plan("fuzz", BIG, vocab_size=512, seed=4)
    suspect = aborted_turns(plan)[3]
    leak = replace_finding(LEAK, operations=(suspect.id,))
    runs = iter(range(10_000))

    def probe(candidate: Plan, where: Cell) -> list[Finding]:
        """A race: each aborted turn has a chance, so that a long plan always shows it."""
        chances = len(aborted_turns(candidate))
        return [leak] if chances > 10 or (chances and next(runs) % 2) else []

    made = minimise(plan, BIG, leak, probe, budget=Budget(probes=400, seconds=60))
    assert made is not None
    assert made.steps[0].startswith(f"what ran beside operation {suspect.id}: ")
    assert made.operations <= 6
    beside = passes.beside(plan, suspect.id)
    assert suspect in beside.operations
    assert passes.size(beside) < passes.size(plan) / 2
    check_plan(passes.direct(beside).operations)


def test_a_race_with_many_chances_is_searched_again_with_more_patience() -> None:
    plan = make_plan("fuzz", BIG, vocab_size=512, seed=4)
    runs = iter(range(10_000))

    def probe(candidate: Plan, where: Cell) -> list[Finding]:
        chances = len(aborted_turns(candidate))
        return [LEAK] if chances > 10 or (chances and next(runs) % 3 == 2) else []

    made = minimise(plan, BIG, LEAK, probe, budget=Budget(probes=900, seconds=60))
    assert made is not None
    assert made.operations <= 6


def test_a_strict_server_is_exchanged_for_one_that_lives_on() -> None:
    said = replace_finding(LEAK, kind="K01", oracle="engine_log")
    cell = replace(BIG, features=replace(BIG.features, strict=True))
    plan = make_plan("nth-mid-abort", cell, vocab_size=512, seed=1)

    def probe(candidate: Plan, where: Cell) -> list[Finding]:
        return [] if not aborted_turns(candidate) else [said if where.features.strict else LEAK]

    made = minimise(plan, cell, said, probe)
    assert made is not None
    assert not made.cell.features.strict
    assert (made.finding, made.operations) == (LEAK, 3)


def replace_finding(finding: Finding, **fields: str) -> Finding:
    return Finding(**{**{name: getattr(finding, name) for name in finding.__struct_fields__}, **fields})


def test_a_kind_may_give_way_to_one_that_both_named() -> None:
    unsure = Finding(kind="K01", oracle="conservation", status="leak", headline="", pool="full", also=("K05",))
    sure = Finding(kind="K05", oracle="conservation", status="leak", headline="", pool="full", also=("K01",))
    assert same(sure, unsure)
    assert not same(LEAK, unsure)
    assert not same(sure, replace_finding(unsure, pool="swa"))


@pytest.mark.parametrize(
    ("seen", "tried", "low", "high"), [(3, 3, 0.43, 1.0), (1, 2, 0.09, 0.91), (0, 0, 0, 1)]
)
def test_the_interval_is_wilsons(seen: int, tried: int, low: float, high: float) -> None:
    found = Rate(seen, tried).interval
    assert found == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(WORKLOADS)), data=st.data())
def test_whatever_is_dropped_the_rest_makes_sense(name: str, data: st.DataObject) -> None:
    plan = make_plan(name, BIG, vocab_size=512, seed=3)
    dropped = data.draw(st.sets(st.sampled_from([op.id for op in plan.operations])))
    for part in (passes.without(plan, dropped), passes.direct(passes.without(plan, dropped))):
        check_plan(part.operations)
        check_plan(passes.in_sequence(part).operations)
        check_plan(passes.renumbered(part).operations)
        assert not {op.id for op in part.operations} & dropped


def test_ordering_points_go_and_the_order_stays() -> None:
    plan = make_plan("nth-mid-abort", BIG, vocab_size=512, seed=3)

    def order(some: Plan) -> dict[int, set[int]]:
        before: dict[int, set[int]] = {}
        for op in some.operations:
            before[op.id] = set(op.after).union(*(before[one] for one in op.after))
        real = {op.id for op in some.operations if op.kind != "barrier"}
        return {number: earlier & real for number, earlier in before.items() if number in real}

    assert order(passes.direct(plan)) == order(plan)
