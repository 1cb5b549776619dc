from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from client_helpers import cell
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcheck.cells import Retract, Speculative
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.workloads import WORKLOADS, make_plan, parameter_names, why_not
from pytest_kvcheck.workloads.base import longest
from pytest_kvcheck.workloads.plan import PlanBuilder, check_plan

UPSTREAM = (
    "kv-inheritance",
    "logprob-concurrent",
    "stress-concurrent",
    "nth-mid-abort",
    "first-mid-abort",
    "pre-abort",
    "abort-leak-repro",
)
EXERCISES = {
    "retract",
    "cached_prefix",
    "evicted_prefix",
    "chunked_prefill",
    "mixed_chunk",
    "abort_mid_decode",
    "abort_queued",
    "reject",
    "disconnect",
    "session_timeout",
    "close_in_flight",
    "cached_turn",
    "speculation",
    "stopped",
    "parallel_samples",
}
CELLS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "page-16": {"page_size": 16},
    "page-256": {"page_size": 256},
    "mixed-chunk-retract": {"chunked_prefill": 128, "mixed_chunk": True, "retract": Retract(3)},
    "abort-leak": {"context_length": 512, "page_size": 256, "chunked_prefill": 4096, "max_running": 32},
    "small": {"context_length": 1024, "pool_tokens": 2048, "chunked_prefill": 128, "max_running": 8},
    "no-pool": {"pool_tokens": None, "chunked_prefill": None},
}


def plan(name: str, scale: float = 1.0, seed: int = 1, **features: Any) -> Plan:
    return make_plan(name, cell(**features), vocab_size=512, seed=seed, scale=scale)


def kinds(made: Plan) -> Counter[str]:
    return Counter(op.kind for op in made.operations)


def rounds_of_turns(made: Plan) -> list[list[Operation]]:
    """The requests between two barriers: what is in flight together."""
    groups = groupby(made.operations, lambda op: op.kind == "barrier")
    return [found for fence, ops in groups if not fence and (found := [op for op in ops if op.generates])]


# --- shapes ----------------------------------------------------------------------------------------
def test_kv_inheritance_is_one_session_of_three_turns_of_twelve_tokens() -> None:
    made = plan("kv-inheritance")
    turns = [op for op in made.operations if op.kind == "turn"]
    assert [op.max_new_tokens for op in turns] == [12, 12, 12]
    assert {op.session for op in turns} == {"s0"}
    assert "retract" not in plan("kv-inheritance", retract=Retract(3)).must_exercise


def test_logprob_concurrent_is_six_sessions_five_turns_ten_rounds_three_modes() -> None:
    made = plan("logprob-concurrent")
    assert kinds(made)["turn"] == 6 * 5 * 10 * 3
    assert Counter(op.logprobs for op in made.operations if op.kind == "turn") == {
        "output": 300,
        "input": 300,
        "none": 300,
    }
    groups = rounds_of_turns(made)
    assert {len(group) for group in groups} == {6}
    assert len(groups) == 5 * 10 * 3
    assert all(len({op.session for op in group}) == 6 for group in groups)
    # Fresh sessions each round; one of them begins with a prompt of more than one chunk.
    assert kinds(made)["open"] == kinds(made)["close"] == 180
    assert [sum(len(op.input_ids) > 512 for op in group) for group in groups[::5]] == [1] * 30


def test_stress_is_eight_sessions_and_four_plain_of_six_turns_of_sixteen_tokens() -> None:
    made = plan("stress-concurrent")
    groups = rounds_of_turns(made)
    assert [Counter(op.kind for op in group) for group in groups] == [{"turn": 8, "generate": 4}] * 6
    assert {op.max_new_tokens for op in made.operations if op.generates} == {16}
    assert all(195 <= len(op.input_ids) <= 200 for op in made.operations if op.generates)


@pytest.mark.parametrize("name", ["nth-mid-abort", "first-mid-abort"])
def test_mid_aborts_hit_the_right_turn_at_set_token_counts(name: str) -> None:
    made = plan(name)
    by_id = {op.id: op for op in made.operations}
    aborts = [op for op in made.operations if op.kind == "abort"]
    assert sorted(op.when_tokens for op in aborts) == [1, 2, 3, 4, 5, 6]
    for abort in aborts:
        assert abort.target is not None
        target = by_id[abort.target]
        before = [op for op in made.operations if op.session == target.session and op.id < target.id]
        turns = [op for op in before if op.kind == "turn"]
        assert len(turns) == (2 if name == "nth-mid-abort" else 0)
        after = [op for op in made.operations if op.session == target.session and op.id > target.id]
        assert [op.kind for op in after] == ["turn", "turn", "close"]
        assert target.max_new_tokens - abort.when_tokens >= 250


def test_pre_abort_sends_what_must_be_rejected_and_goes_on() -> None:
    made = plan("pre-abort")
    turns = [op for op in made.operations if op.kind == "turn"][:5]
    assert [op.expect for op in turns] == ["finish", "reject", "finish", "reject", "finish"]
    assert turns[1].invalid == "offset"
    # By itself the prompt would fit; with the history it does not.
    assert len(turns[3].input_ids) < 4096 < len(turns[3].input_ids) + 3 * 8
    resent = make_plan("pre-abort", cell(), vocab_size=512, seed=1, sessions="resent")
    assert all(op.invalid is None for op in resent.operations)
    assert any(op.expect == "reject" for op in resent.operations)


def test_abort_leak_repro_has_its_eight_rounds_and_fits_512_tokens() -> None:
    made = plan("abort-leak-repro", **CELLS["abort-leak"])
    groups = rounds_of_turns(made)
    assert [op.max_new_tokens for op in groups[0]] == [16] * 4
    shapes = [Counter((op.kind, op.expect) for op in group) for group in groups[1:]]
    a_round = [
        {("turn", "finish"): 4, ("generate", "finish"): 2},
        {("turn", "reject"): 4},
        {("turn", "finish"): 4},
    ]
    assert shapes == a_round * 8
    assert all(len(op.input_ids) >= 600 for op in made.operations if op.expect == "reject")
    assert {op.max_new_tokens for group in groups[1:] for op in group} == {4}
    assert kinds(made)["open"] == 4
    held = sum(
        len(op.input_ids) + op.max_new_tokens
        for op in made.operations
        if op.session == "g0-s0" and op.kind == "turn" and op.expect == "finish"
    )
    assert held <= 512


# --- what holds for every plan -----------------------------------------------------------------------
@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("features", list(CELLS.values()), ids=list(CELLS))
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_every_plan_makes_sense_and_fits_its_cell(name: str, features: dict[str, Any], scale: float) -> None:
    here = cell(**features)
    if why_not(name, here) is not None:
        return
    made = make_plan(name, here, vocab_size=512, seed=7, scale=scale)
    check_plan(made.operations)
    assert made.workload == name
    assert set(made.must_exercise) <= EXERCISES
    assert set(made.params) == set(WORKLOADS[name].params)
    held: Counter[str] = Counter()
    for op in made.operations:
        assert all(10 <= token < 502 for token in op.input_ids)
        if op.generates:
            assert op.input_ids, op.label
            assert op.max_new_tokens >= 1
            assert op.label
        if op.generates and op.expect != "reject":
            key = op.session or f"plain {op.id}"
            held[key] += len(op.input_ids) + op.max_new_tokens
            assert held[key] <= longest(here), op.label
    # What has a timeout is left to the server; everything else is closed.
    opened = {op.session for op in made.operations if op.kind == "open" and op.timeout is None}
    assert opened <= {op.session for op in made.operations if op.kind == "close"}


@pytest.mark.parametrize("name", UPSTREAM)
def test_the_upstream_shapes_run_in_every_cell_of_the_llama_matrix(name: str) -> None:
    for features in ("baseline", "page-16", "page-256", "mixed-chunk-retract", "abort-leak"):
        assert why_not(name, cell(**CELLS[features])) is None


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_scale_changes_rounds_and_nothing_else(name: str) -> None:
    features = CELLS["small"] if why_not(name, cell()) else CELLS["baseline"]
    whole, least = plan(name, **features), plan(name, scale=0.001, **features)
    assert {key: value for key, value in whole.params.items() if key != "rounds"} == {
        key: value for key, value in least.params.items() if key != "rounds"
    }
    assert least.params.get("rounds", 1) == 1
    # What a shorter fuzz draws may hold nothing that must be refused.
    assert least.must_exercise == whole.must_exercise or name == "fuzz"
    assert len(least.operations) <= len(whole.operations)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(WORKLOADS)), st.integers(0, 2**32))
def test_equal_seeds_give_equal_plans_and_others_do_not(name: str, seed: int) -> None:
    if why_not(name, cell()) is None:
        assert plan(name, seed=seed) == plan(name, seed=seed)
        ids = [[op.input_ids for op in plan(name, seed=each).operations] for each in (seed, seed + 1)]
        assert ids[0] != ids[1]


def test_tokens_are_the_same_on_every_machine() -> None:
    assert PlanBuilder("fixed", 42, 512).ids(6) == (250, 152, 322, 478, 15, 182)


@pytest.mark.parametrize(
    ("name", "features", "seen", "unseen"),
    [
        ("stress-concurrent", {"retract": Retract(3)}, {"retract"}, {"chunked_prefill"}),
        ("stress-concurrent", {"retract": Retract(30)}, set(), {"retract"}),
        ("stress-concurrent", {"chunked_prefill": 128}, {"chunked_prefill"}, {"mixed_chunk", "retract"}),
        ("logprob-concurrent", CELLS["mixed-chunk-retract"], {"mixed_chunk", "retract"}, {"speculation"}),
        ("logprob-concurrent", CELLS["abort-leak"], {"cached_turn"}, {"chunked_prefill"}),
        ("logprob-concurrent", CELLS["no-pool"], {"cached_turn"}, {"chunked_prefill"}),
        ("kv-inheritance", {"speculative": Speculative()}, {"speculation"}, {"retract"}),
        ("nth-mid-abort", {}, {"abort_mid_decode"}, {"reject"}),
        ("pre-abort", {}, {"reject"}, {"abort_mid_decode"}),
    ],
)
def test_only_what_a_plan_surely_does_must_be_seen(
    name: str, features: dict[str, Any], seen: set[str], unseen: set[str]
) -> None:
    found = set(plan(name, **features).must_exercise)
    assert seen <= found
    assert not unseen & found


@pytest.mark.parametrize(
    ("name", "features", "reason"),
    [
        ("stress-concurrent", {"max_running": 8}, "needs max_running >= 12, the cell has 8"),
        ("stress-concurrent", {"pool_tokens": 1024}, "needs pool_tokens >= "),
        ("prefill-abort", CELLS["abort-leak"], "needs a context of more than two chunks of 4096 tokens"),
        ("pinned-pool", {}, "needs pool_tokens <= 16384, the cell has 65536"),
        ("close-in-flight", {"streaming_session": False}, "needs streaming_session: true"),
        ("kv-inheritance", {"context_length": 64}, "needs context_length >= "),
    ],
)
def test_a_cell_that_cannot_run_a_workload_is_told_why(
    name: str, features: dict[str, Any], reason: str
) -> None:
    found = why_not(name, cell(**features))
    assert found is not None
    assert found.startswith(reason)


# --- parameters ----------------------------------------------------------------------------------------
def test_parameters_are_checked_and_used() -> None:
    made = make_plan("kv-inheritance", cell(), vocab_size=512, seed=1, params={"turns": 5})
    assert kinds(made)["turn"] == 5
    assert made.params["turns"] == 5
    with pytest.raises(ValueError, match="found 'turn'; did you mean 'turns'"):
        make_plan("kv-inheritance", cell(), vocab_size=512, seed=1, params={"turn": 5})
    with pytest.raises(ValueError, match="expected int of at least 1, found 0"):
        make_plan("kv-inheritance", cell(), vocab_size=512, seed=1, params={"turns": 0})
    with pytest.raises(ValueError, match="expected int of at least 1, found 'many'"):
        make_plan("kv-inheritance", cell(), vocab_size=512, seed=1, params={"turns": "many"})
    assert parameter_names()["kv-inheritance"] == {"turns", "max_new_tokens"}
    assert "needs max_running >= 40" in str(why_not("logprob-concurrent", cell(), {"sessions": 40}))


def test_a_tiny_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 20 tokens, found 16"):
        make_plan("kv-inheritance", cell(), vocab_size=16, seed=1)


# --- plans that make no sense --------------------------------------------------------------------------
def op(number: int, kind: str, **fields: Any) -> Operation:
    return Operation(id=number, kind=kind, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ([op(0, "open", session="a"), op(0, "close", session="a")], "a new id"),
        ([op(0, "wait", after=(1,)), op(1, "wait")], "expected `after` to name earlier operations, found 1"),
        ([op(0, "turn", session="a")], "an open of 'a' before its first turn"),
        ([op(0, "open", session="a"), op(1, "open", session="a")], "a new session, found 'a' again"),
        (
            [op(0, "open", session="a"), *(op(n, "turn", session="a", after=(0,)) for n in (1, 2))],
            "one turn in flight a session, found operation 1 beside it",
        ),
        ([op(0, "abort", target=5)], "an earlier operation as target, found 5"),
        ([op(0, "wait"), op(1, "abort", target=0)], "a request as target, found wait"),
        ([op(0, "disconnect")], "expected a target, found none"),
        ([op(0, "close")], "expected a session, found none"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(operations: list[Operation], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_plan(operations)


def test_turns_may_be_ordered_through_others() -> None:
    builder = PlanBuilder("x", 1, 512)
    builder.open("a")
    builder.turn("a", 4, 4)
    builder.fence()
    builder.fence()  # nothing since the last: no second barrier
    builder.turn("a", 4, 4)
    check_plan(builder.operations)
    assert [each.kind for each in builder.operations] == ["open", "turn", "barrier", "turn"]
    assert builder.operations[-1].after == (2,)
    check_plan([op(0, "turn", session="a")], open_sessions=["a"])


def test_what_follows_a_hold_still_follows_its_own_session() -> None:
    builder = PlanBuilder("x", 1, 512)
    builder.open("a")
    first = builder.turn("a", 4, 400)
    builder.hold([builder.running(first)])
    second = builder.turn("a", 4, 4)
    assert first in builder.operations[second].after
    check_plan(builder.operations)
