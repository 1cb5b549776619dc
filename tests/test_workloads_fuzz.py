"""Fuzzed plans: legal in every cell that they say they run in, equal for equal seeds, near state changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_helpers import facts_of, make_cell, op_record

from pytest_kvcheck.cells import Cell, Retract
from pytest_kvcheck.operations import OVERLAP, Plan
from pytest_kvcheck.oracles.pairs import covered, pair_counts, possible
from pytest_kvcheck.trace import Reply
from pytest_kvcheck.workloads import make_plan, why_not

PLAIN = make_cell(context_length=2048, chunked_prefill=128, pool_tokens=16384, max_running=12)


def fuzz(cell: Cell, seed: int, **fields: object) -> Plan:
    return make_plan("fuzz", cell, vocab_size=512, seed=seed, **fields)  # type: ignore[arg-type]


cells = st.builds(
    make_cell,
    page_size=st.sampled_from([1, 16, 64, 256]),
    context_length=st.sampled_from([512, 1024, 4096]),
    pool_tokens=st.sampled_from([4096, 8192, 32768, None]),
    chunked_prefill=st.sampled_from([None, 256, 512, 8192]),
    max_running=st.sampled_from([3, 8, 16, 32]),
    retract=st.sampled_from([None, Retract(3)]),
)


@settings(max_examples=120, deadline=None)
@given(cell=cells, seed=st.integers(0, 2**32), sessions=st.sampled_from(["streaming", "resent"]))
def test_any_seed_gives_a_plan_that_fits_its_cell(cell: Cell, seed: int, sessions: str) -> None:
    if why_not("fuzz", cell) is not None:
        return
    plan = fuzz(cell, seed, sessions=sessions)  # make_plan checks order and references
    features = cell.features
    held: Counter[str] = Counter()
    for op in plan.operations:
        if op.expect == "reject":
            continue
        if op.kind == "turn" and op.session is not None:
            held[op.session] += len(op.input_ids) + op.max_new_tokens
            assert held[op.session] < features.context_length
        if op.kind == "generate":
            assert 1 <= len(op.input_ids) + op.max_new_tokens < features.context_length
        if op.generates:
            assert op.input_ids
            assert op.max_new_tokens >= 1
            assert all(10 <= one < 502 for one in op.input_ids)
    assert most_at_once(plan) <= features.max_running
    closes = [op.session for op in plan.operations if op.kind == "close"]
    opens = [op.session for op in plan.operations if op.kind == "open" and op.timeout is None]
    assert set(closes) == set(opens), "what a plan opens it closes"


def most_at_once(plan: Plan) -> int:
    """The most rows that sessions and plain requests can hold at the same time."""
    most, open_sessions, plain = 0, set(), 0
    for op in plan.operations:
        if op.kind == "barrier":
            plain = 0
        elif op.kind == "open":
            open_sessions.add(op.session)
        elif op.kind == "close":
            open_sessions.discard(op.session)
        elif op.kind == "generate":
            plain += 1
        most = max(most, len(open_sessions) + plain)
    return most


def digest(plan: Plan) -> str:
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()


def test_a_seed_gives_the_same_plan_in_every_process() -> None:
    program = (
        "import hashlib, msgspec\n"
        "from test_workloads_fuzz import PLAIN, fuzz, digest\n"
        "print(digest(fuzz(PLAIN, 5)))"
    )
    found = set()
    for hashes in ("0", "77"):
        env = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.path.dirname(__file__)}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True, timeout=120
        )
        found.add(done.stdout.strip())
    assert found == {digest(fuzz(PLAIN, 5))}
    assert digest(fuzz(PLAIN, 6)) not in found


def test_rounds_scale_and_shape_stays() -> None:
    small, great = fuzz(PLAIN, 1, scale=0.5), fuzz(PLAIN, 1, scale=4.0)
    assert (small.params["rounds"], great.params["rounds"]) == (3, 24)
    assert len(great.operations) > 4 * len(small.operations)


def test_a_few_seeds_draw_every_operation() -> None:
    labels: Counter[str] = Counter()
    for seed in range(12):
        for op in fuzz(PLAIN, seed).operations:
            labels[" ".join(op.label.split()[-2:]) if op.generates else op.kind] += 1
    assert {"open", "close", "abort", "disconnect", "wait", "barrier"} <= set(labels)
    for end in ("aborted", "left", "closed"):
        assert any(label.endswith(f"turn {end}") for label in labels), end
    for label in ("over-length turn", "an offset", "prefix request", "long request", "plain request"):
        assert labels[label], label


def test_what_an_engine_is_known_to_fail_by_at_once_is_not_drawn_for_it() -> None:
    """Else its search would end there each time; ``docs/findings`` has both."""
    cells = {
        name: replace(make_cell(context_length=2048, max_running=12, retract=Retract(3)), engine=name)
        for name in ("reference", "sglang")
    }
    drawn = {name: [op for at in range(12) for op in fuzz(cell, at).operations] for name, cell in cells.items()}
    overlaps = {name: sum(op.invalid == OVERLAP for op in some) for name, some in drawn.items()}
    assert overlaps["reference"] > 0 == overlaps["sglang"]
    first = {name: [n for at in range(12) for n in first_turns(fuzz(cell, at))] for name, cell in cells.items()}
    assert min(first["reference"]) == 1
    assert min(first["sglang"]) == 2


def first_turns(plan: Plan) -> list[int]:
    """The prompt of each session's first turn that runs, in tokens."""
    found: dict[str | None, int] = {}
    for op in plan.operations:
        if op.kind == "turn" and op.expect != "reject":
            found.setdefault(op.session, len(op.input_ids))
    return list(found.values())


@pytest.mark.parametrize("page", [16, 256])
def test_prompts_and_ends_are_drawn_to_page_edges(page: int) -> None:
    cell = make_cell(context_length=4096, chunked_prefill=512, pool_tokens=65536, page_size=page)
    near = total = 0
    for seed in range(10):
        held: Counter[str] = Counter()
        for op in fuzz(cell, seed).operations:
            if op.kind == "turn" and op.session is not None and op.expect == "finish":
                prompt = held[op.session] + len(op.input_ids)
                held[op.session] = prompt + op.max_new_tokens
                near += any((end + 1) % page <= 2 for end in (prompt, held[op.session]))
                total += 1
    assert near > total / 4


def test_aborts_come_near_state_changes() -> None:
    retract = make_cell(context_length=2048, pool_tokens=16384, max_running=12, retract=Retract(8))
    close = total = 0
    for seed in range(10):
        plan = fuzz(retract, seed)
        requests = {op.id: op for op in plan.operations}
        for op in plan.operations:
            if op.kind == "abort" and op.target is not None:
                new = requests[op.target].max_new_tokens
                edges = (0, 1, new, 8, 16, 24)
                close += any(abs(op.when_tokens - edge) <= 2 for edge in edges)
                total += 1
    assert close == total > 40


# --- pairs ---------------------------------------------------------------------------------------------
def test_pairs_are_what_met_in_time_and_in_a_session() -> None:
    records = [
        op_record("open", 0, at=0, session="s"),
        op_record("turn", 1, at=2, lasts=4, session="s", reply=Reply(finish="length")),
        op_record("generate", 2, at=3, lasts=1, reply=Reply(finish="abort")),
        op_record("turn", 3, at=8, session="s", reply=Reply(finish="rejected")),
        op_record("generate", 4, at=20, reply=Reply(finish="length", retractions=1)),
    ]
    facts = facts_of(records, cell=PLAIN)
    assert covered(facts) == {
        ("then", "open", "turn"),
        ("then", "turn", "turn refused"),
        ("beside", "generate aborted", "turn"),
    }
    assert pair_counts(facts)["operation_pairs"] == 3


def test_only_what_a_cell_can_show_is_possible() -> None:
    retract = make_cell(retract=Retract(3))
    assert not any("turn retracted" in pair for pair in possible(PLAIN))
    assert ("then", "turn retracted", "turn aborted") in possible(retract)
    assert not any("turn long" in pair for pair in possible(make_cell(chunked_prefill=None)))
    assert ("then", "turn closed", "turn") not in possible(PLAIN)
