"""Log-probs: wrong KV is found at every noise level, and no clean server is accused, however noisy."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from oracle_helpers import VOCAB, Noise, Simulated, changed, facts_of, make_cell, no_noise, whole_case

from pytest_kvcheck.findings import Finding
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.oracles.logprobs import judge_logprobs, measure, self_test, suspects
from pytest_kvcheck.workloads.plan import PlanBuilder, check_plan
from pytest_kvcheck.workloads.replay import confirm_plan, control_plan, replay_plan, self_test_plan


def workload(sessions: int = 4, turns: int = 3, new: int = 8, rounds: int = 2) -> Plan:
    plan = PlanBuilder("test", 0, VOCAB)
    for round_ in range(rounds):
        names = [f"r{round_}-s{at}" for at in range(sessions)]
        for name in names:
            plan.open(name)
        plan.fence()
        for turn in range(turns):
            for name in names:
                plan.turn(name, 20, new, logprobs="output", label=f"{name} turn {turn + 1}")
            plan.generate(30, new, logprobs="output", label=f"plain {turn + 1}")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return Plan(workload="test", seed=0, operations=tuple(plan.operations))


def gauss(size: float) -> Noise:
    return lambda source, batched, op, place: source.gauss(0, size)


def heavy(size: float) -> Noise:
    """Noise as half precision makes it: mostly small, some tokens several times that."""
    return lambda source, batched, op, place: source.gauss(0, size) * (4 if source.random() < 0.03 else 1)


def in_batches(size: float) -> Noise:
    return lambda source, batched, op, place: (
        random.Random(f"{op.label} {place}").uniform(-size, size) * batched
    )


def wrong_slot(turns: str, shift: float = 0.2, share: float = 0.6) -> Noise:
    """What one wrong slot does to the tokens behind it: most move, some by much."""

    def fault(source: random.Random, batched: bool, op: Operation, place: int) -> float:
        if not op.label.endswith(turns):
            return 0.0
        other = random.Random(f"fault {op.id} {place}")
        return other.choice((-1, 1)) * shift * (0.3 + other.random()) * (other.random() < share or place == 1)

    return fault


def rare_jumps(source: random.Random, batched: bool, op: Operation, place: int) -> float:
    """Equal to the bit, but for 8e-5 in one control and for the turns of one session: vLLM in bfloat16."""
    if op.label.startswith("control serial 1"):
        return 8.5e-5 * (place == 3)
    return random.Random(f"{op.label} {place}").uniform(-0.03, 0.03) * (op.session == "r0-s1")


CLEAN = {
    "equal to the bit, but for rare jumps": Simulated(decode=rare_jumps),
    "exact": Simulated(),
    "fp32": Simulated(decode=gauss(2e-6), prefill=gauss(2e-6)),
    "fp32 rounded to 4 digits": Simulated(decode=gauss(2e-6), digits=4),
    "exact rounded to 4 digits": Simulated(digits=4),
    "rounded to 3 digits": Simulated(decode=gauss(1e-4), digits=3),
    "bf16": Simulated(decode=heavy(0.015)),
    "bf16, coarse": Simulated(decode=heavy(0.03), prefill=gauss(0.01)),
    "exact alone, 0.05 in batches": Simulated(decode=in_batches(0.05)),
    "fp32 alone, 0.08 in batches": Simulated(decode=lambda *a: gauss(1e-5)(*a) + in_batches(0.08)(*a)),
    "scoring is noisy, decoding is not": Simulated(prefill=gauss(0.01)),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("seed", range(4))
def test_a_clean_server_stays_unaccused(name: str, seed: int) -> None:
    engine = dataclasses.replace(CLEAN[name], seed=seed, records=[], sessions={})
    assert judge_logprobs(whole_case(engine, workload())) == []


def test_noise_of_one_rare_batch_shape_is_told_from_corruption_by_the_rerun() -> None:
    # Exact in every control, 0.12 off wherever at least one other request runs: shown by the re-run alone.
    def odd(source: random.Random, batched: bool, op: Operation, place: int) -> float:
        big = batched and not op.label.startswith("control")
        return random.Random(f"{op.label} {place}").uniform(-0.12, 0.12) * big

    assert judge_logprobs(whole_case(Simulated(decode=odd), workload())) == []


FAULTY = {
    "exact": no_noise,
    "fp32": gauss(2e-6),
    "bf16": heavy(0.012),
}


@pytest.mark.parametrize("floor", FAULTY)
@pytest.mark.parametrize("new", [4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_one_wrong_slot_is_a_mismatch_with_owner_and_place(floor: str, new: int, seed: int) -> None:
    shift = 0.6 if floor == "bf16" else 0.2
    engine = Simulated(decode=FAULTY[floor], fault=wrong_slot("s1 turn 2", shift), seed=seed)
    facts = whole_case(engine, workload(new=new))
    found = judge_logprobs(facts)
    assert [(f.kind, f.status) for f in found] == [("K13", "mismatch")]
    assert found[0].owner is not None
    assert "s1 turn 2" in found[0].owner
    text = found[0].paragraph()
    assert "expected" in text.lower()
    assert "First bad: output token" in text
    assert "agree with each other" in text
    assert found[0].next_step


def test_a_small_shift_on_a_finely_computing_server_is_found() -> None:
    engine = Simulated(decode=gauss(2e-6), fault=wrong_slot("s1 turn 2", 0.02))
    assert [f.kind for f in judge_logprobs(whole_case(engine, workload()))] == ["K13"]


def test_a_fault_that_hits_some_plain_requests_too_does_not_widen_the_floor() -> None:
    def fault(source: random.Random, batched: bool, op: Operation, place: int) -> float:
        hit = op.label.endswith(("turn 2", "batched 1", "batched 4"))
        return 0.24 * (-1) ** place * hit

    facts = whole_case(Simulated(decode=gauss(2e-6), fault=fault), workload())
    assert [f.status for f in judge_logprobs(facts)] == ["mismatch"]
    assert measure(facts.records).spread.greatest < 0.01


def test_controls_that_are_off_by_themselves_are_no_floor() -> None:
    engine = Simulated(decode=gauss(0.4))
    found = judge_logprobs(whole_case(engine, workload()))
    assert [(f.kind, f.status) for f in found] == [("K24", "inconclusive")]
    assert "no noise floor" in found[0].paragraph()


def test_a_wrong_first_token_of_a_plain_request_on_a_cache_hit_is_a_stale_prefix() -> None:
    engine = Simulated(decode=gauss(2e-6), fault=wrong_slot("plain 2", 0.5, share=1.0))
    plan = workload()
    facts = whole_case(engine, plan)
    facts.records = [
        changed(r, cached_tokens=16) if r.op.label == "plain 2" and r.phase == "workload" else r
        for r in facts.records
    ]
    assert [f.kind for f in judge_logprobs(facts)] == ["K17"]


def test_values_that_fit_the_next_token_are_misaligned() -> None:
    engine = Simulated(decode=gauss(2e-6))
    plan = workload()
    engine.run(plan.operations, "workload")
    target = next(r for r in engine.records if r.op.label.endswith("s2 turn 2"))
    values = target.reply.output_logprobs or []
    target.reply.output_logprobs = [*values[1:], -0.5]
    engine.run(control_plan(make_cell(), VOCAB, 1).operations, "control")
    engine.run(replay_plan(engine.records).operations, "replay")
    found = suspects(facts_of(engine.records, plan=plan))
    engine.run(confirm_plan(found).operations, "control")
    engine.run(replay_plan(engine.records, start_id=2_500_000).operations, "replay")
    (finding,) = judge_logprobs(facts_of(engine.records, plan=plan))
    assert finding.kind == "K18"
    assert "1 place later" in finding.paragraph()


def test_a_greedy_token_far_below_the_best_is_a_mismatch_without_log_probs() -> None:
    engine = Simulated(decode=gauss(2e-6))
    plan = workload()
    silent = tuple(
        Operation(**{**{n: getattr(op, n) for n in op.__struct_fields__}, "logprobs": "none"})
        if op.kind == "turn"
        else op
        for op in plan.operations
    )
    plan = Plan(workload="test", seed=0, operations=silent)
    engine.run(plan.operations, "workload")
    assert judge_logprobs(_finish(engine, plan)) == []
    engine = Simulated(decode=gauss(2e-6))
    engine.run(plan.operations, "workload")
    target = next(r for r in engine.records if r.op.label.endswith("s2 turn 3"))
    target.reply.output_ids[3] = 10 + target.reply.output_ids[3] % (VOCAB - 30)
    engine.sessions.clear()
    found = judge_logprobs(_finish(engine, plan))
    assert [f.status for f in found] == ["mismatch"]
    assert "below the best" in found[0].headline


def _finish(engine: Simulated, plan: Plan):  # type: ignore[no-untyped-def]
    engine.run(control_plan(make_cell(), VOCAB, 1).operations, "control")
    engine.run(replay_plan(engine.records).operations, "replay")
    found = suspects(facts_of(engine.records, plan=plan))
    if found:
        engine.run(confirm_plan(found).operations, "control")
        engine.run(replay_plan(engine.records, start_id=2_500_000).operations, "replay")
    return facts_of(engine.records, plan=plan)


def test_a_reference_that_is_not_stable_gives_no_verdict() -> None:
    def unstable(source: random.Random, batched: bool, op: Operation, place: int) -> float:
        hit = (op.target is not None and "s1 turn 3" in op.label) or op.label.startswith("confirm score")
        return random.Random(f"{op.id}{source.random()}").uniform(-0.8, 0.8) * hit

    found = judge_logprobs(whole_case(Simulated(prefill=unstable), workload()))
    assert [(f.kind, f.status) for f in found] == [("K24", "inconclusive")]


def test_suspects_that_were_never_run_again_are_inconclusive_unless_gross() -> None:
    def facts_with(shift: float) -> list[Finding]:
        engine = Simulated(fault=wrong_slot("s1 turn 2", shift, share=1.0))
        plan = workload()
        engine.run(plan.operations, "workload")
        engine.run(control_plan(make_cell(), VOCAB, 1).operations, "control")
        engine.run(replay_plan(engine.records).operations, "replay")
        return judge_logprobs(facts_of(engine.records, plan=plan))

    assert [f.status for f in facts_with(0.2)] == ["inconclusive"]
    assert [f.status for f in facts_with(2.0)] == ["mismatch"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"output_logprobs": [-1.0, math.nan]}, "nan"),
        ({"output_logprobs": [-1.0, None]}, "None"),
        ({"output_logprobs": [-1.0, 0.3]}, "0.3"),
        ({"output_logprobs": [-1.0]}, "1 log-probs came for 2 tokens"),
        ({"output_logprobs": None}, "none came"),
        ({"output_logprobs": [-1.0, -2.0], "input_logprobs": [None, -1.0, None]}, "input"),
    ],
)
def test_values_that_are_no_log_probs_are_found_at_once(fields: dict[str, object], says: str) -> None:
    engine = Simulated()
    plan = PlanBuilder("test", 0, VOCAB)
    plan.generate(8, 2, logprobs="output")
    (record,) = engine.run(plan.operations, "workload")
    (finding,) = [f for f in judge_logprobs(facts_of([changed(record, **fields)])) if f.kind == "K18"]
    assert says in finding.headline
    assert finding.status == "mismatch"


def test_log_probs_that_nothing_was_compared_with_are_inconclusive() -> None:
    engine = Simulated()
    engine.run(workload().operations, "workload")
    (finding,) = judge_logprobs(facts_of(engine.records))
    assert finding.status == "inconclusive"
    assert "none was compared" in finding.headline


def test_the_self_test_sees_one_replaced_token_and_says_so_where_it_cannot() -> None:
    engine = Simulated()
    facts = whole_case(engine, workload())
    engine.run(self_test_plan(engine.records, VOCAB).operations, "replay")
    facts.records = list(engine.records)
    assert self_test(facts) == []
    # A model that does not look at its context: the scoring is as if nothing had been replaced.
    for record in facts.records:
        if record.op.label.startswith("self-test"):
            original = next(r for r in facts.records if r.op.id == record.op.target)
            values = original.reply.output_logprobs or []
            record.reply.input_logprobs = [-1.0] * (len(record.op.input_ids) - len(values)) + list(values)
    (finding,) = self_test(facts)
    assert finding.status == "inconclusive"
    assert "blind" in finding.headline


def test_plans_are_valid_and_keep_to_their_cell() -> None:
    cell = make_cell(context_length=128, page_size=16, chunked_prefill=32, max_running=4, pool_tokens=512)
    plan = control_plan(cell, VOCAB, 3)
    check_plan(plan.operations)
    assert plan == control_plan(cell, VOCAB, 3)
    assert all(len(op.input_ids) + op.max_new_tokens < 128 for op in plan.operations)
    engine = Simulated()
    engine.run(workload().operations, "workload")
    replay = replay_plan(engine.records, limit=5)
    check_plan(replay.operations)
    assert len(replay.operations) == 5
    assert len(replay_plan(engine.records).operations) == 8 + 6
    engine.run(replay.operations, "replay")
    assert len(replay_plan(engine.records).operations) == 8 + 6 - 5
