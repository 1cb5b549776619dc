"""Arithmetic, liveness, exercise and protocol: planted faults with kind and owner; legal races stay quiet."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_helpers import (
    VOCAB,
    Simulated,
    changed,
    event,
    facts_of,
    gauges,
    make_cell,
    op_record,
    promises,
    sample,
)

from pytest_kvcheck.operations import Plan
from pytest_kvcheck.oracles import ORACLES, judge
from pytest_kvcheck.oracles.base import CaseFacts, ServerFacts
from pytest_kvcheck.oracles.exercise import COUNTERS, judge_exercise
from pytest_kvcheck.oracles.liveness import judge_liveness
from pytest_kvcheck.oracles.protocol import judge_protocol
from pytest_kvcheck.oracles.session_arithmetic import judge_session_arithmetic
from pytest_kvcheck.trace import OpRecord, Reply
from pytest_kvcheck.workloads.plan import PlanBuilder
from pytest_kvcheck.workloads.replay import canary_plan, row_probe_plan


def turns(*replies: dict[str, Any], session: str = "s", new: int = 20, out: int = 8) -> list[OpRecord]:
    """Turns of one session, one second each, two seconds apart; each reply overrides what is right."""
    records, history = [], 0
    for at, fields in enumerate(replies):
        op = {"expect": fields.pop("expect", "finish"), "label": f"{session} turn {at + 1}"}
        start = fields.pop("at", 2.0 * at)
        shown = fields.pop("shown", out)
        finish = fields.get("finish", "length")
        base: dict[str, Any] = {
            "http_status": 200,
            "finish": "length",
            "prompt_tokens": history + new,
            "cached_tokens": max(0, history - 1),
            "completion_tokens": shown,
            "output_ids": list(range(shown)),
            "retractions": 0,
        }
        record = op_record(
            "turn", at, session=session, input_ids=tuple(range(new)), max_new_tokens=out, history=history,
            at=start, first=start + 0.1, reply=Reply(**{**base, **fields}), **op,
        )  # fmt: skip
        records.append(record)
        if finish in ("length", "stop"):
            history += new + shown
    return records


def kinds(findings: list[Any]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.status) for finding in findings]


ABORT = {"finish": "abort", "shown": 3, "expect": "either"}
REJECT = {"finish": "rejected", "shown": 0, "prompt_tokens": None, "cached_tokens": None, "expect": "reject"}


# --- session arithmetic --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("replies", "kind"),
    [
        ([{}, {"prompt_tokens": 47}], "K02"),
        ([{}, {"prompt_tokens": 49}], "K02"),
        ([{}, ABORT, {"prompt_tokens": 48 + 23, "cached_tokens": 50}], "K06"),
        ([{}, ABORT, {"prompt_tokens": 20, "cached_tokens": 0}], "K06"),
        ([{}, {"finish": "disconnected", "shown": 3}, {"prompt_tokens": 1, "cached_tokens": 0}], "K06"),
        ([{}, REJECT, {"prompt_tokens": 49}], "K06"),
        ([{}, {"cached_tokens": 29}], "K19"),
        ([{}, {"cached_tokens": 26}], "K02"),
        ([{}, {}, {"cached_tokens": 0}], "K25"),
        ([{}, REJECT, {"cached_tokens": 0}], "K25"),
        ([{"completion_tokens": 9}], "K19"),
        ([{"shown": 6}], "K19"),
        ([{"cached_tokens": 21}], "K19"),
    ],
)
def test_a_wrong_count_is_a_mismatch_of_its_kind(replies: list[dict[str, Any]], kind: str) -> None:
    records = turns(*(dict(reply) for reply in replies))
    found = judge_session_arithmetic(facts_of(records))
    assert kinds(found) == [(kind, "mismatch")]
    assert found[0].owner == records[-1].op.label
    assert found[0].next_step
    assert "rid-" in found[0].evidence[0]


@pytest.mark.parametrize(
    "replies",
    [
        [{}, {}, {"cached_tokens": 56}],
        # Aborts that raced with the end: the reply's word counts.
        [{}, {"expect": "either"}, {}],
        [{}, ABORT, {"cached_tokens": 0}, {}],
        [ABORT, {"cached_tokens": 0}, {}],
        # A turn whose prompt is in the prefix cache since it was aborted.
        [{}, ABORT, {"cached_tokens": 40}],
        [{}, REJECT, {"cached_tokens": 1}],
        # Retracted turns count what they recompute in their own way.
        [{}, {"retractions": 2, "cached_tokens": 3}, {}],
        [{}, {"retractions": 1, "cached_tokens": 0}, {"retractions": 1, "cached_tokens": 78}],
        # The server finished the turn behind a closed socket before it noticed.
        [{}, {"finish": "disconnected", "shown": 3}, {"prompt_tokens": 76, "cached_tokens": 55}],
        [{}, {"finish": "timeout", "shown": 0}, {"cached_tokens": 0}],
        # An engine that sends no counts.
        [{}, {"prompt_tokens": None, "cached_tokens": None, "completion_tokens": None}],
    ],
)
def test_what_is_legal_stays_quiet(replies: list[dict[str, Any]]) -> None:
    assert judge_session_arithmetic(facts_of(turns(*(dict(reply) for reply in replies)))) == []


def test_many_wrong_turns_are_one_finding_with_their_number() -> None:
    records = [r for n in range(30) for r in turns({}, {"cached_tokens": 29}, session=f"s{n}")]
    (finding,) = judge_session_arithmetic(facts_of(records))
    assert "30 such replies" in finding.paragraph()


def test_an_error_that_later_turns_inherit_is_told_once() -> None:
    records = turns({}, {"prompt_tokens": 47}, {"prompt_tokens": 75}, {"prompt_tokens": 103})
    assert len(judge_session_arithmetic(facts_of(records))) == 1


def test_resent_histories_may_be_evicted_under_pressure_and_by_a_flush() -> None:
    lost = turns({}, {"cached_tokens": 0})
    resent = promises(streaming_sessions=False, expected_cached=lambda previous, sent: (previous - 1, sent - 1))
    assert kinds(judge_session_arithmetic(facts_of(lost, promises=resent))) == [("K25", "mismatch")]
    small = facts_of(lost, make_cell(pool_tokens=64), promises=resent, idle=sample(gauges(total=64)))
    assert judge_session_arithmetic(small) == []
    full = facts_of(lost, promises=resent, samples=[sample(gauges(used=4000))])
    assert judge_session_arithmetic(full) == []
    flush = op_record("flush", 9, at=1.5, lasts=0.1)
    assert judge_session_arithmetic(facts_of([lost[0], flush, lost[1]])) == []


def test_a_context_that_ends_gives_fewer_tokens() -> None:
    records = turns({"shown": 3})
    assert judge_session_arithmetic(facts_of(records, make_cell(context_length=28))) == []


BUSY = {"finish": "rejected", "message": "Streaming session already has an active request.", "shown": 0}


def test_a_session_that_stays_in_flight_is_stuck() -> None:
    replies: list[dict[str, Any]] = [{}, dict(ABORT), *({**BUSY, "at": 20.0 + 10 * n} for n in range(3))]
    records = turns(*replies)
    (finding,) = judge_session_arithmetic(facts_of(records))
    assert (finding.kind, finding.status) == ("K07", "stuck")
    assert "no turn of this session is in flight" in finding.headline
    # A server that says that it is idle has no excuse at all.
    quick = turns({}, dict(ABORT), {**BUSY, "at": 4.0})
    assert judge_session_arithmetic(facts_of(quick, samples=[sample(t=3.5)])) != []


def test_a_short_window_after_an_abort_is_no_dead_end() -> None:
    assert judge_session_arithmetic(facts_of(turns({}, dict(ABORT), {**BUSY, "at": 4.0}))) == []
    assert judge_session_arithmetic(facts_of(turns({}, dict(ABORT), {**BUSY, "at": 20.0}, {"at": 22.0}))) == []


# --- liveness ------------------------------------------------------------------------------------------
def canary(finish: Any, attempt: int = 1, when: str = "after", lasts: float = 60.0, **reply: Any) -> OpRecord:
    return op_record(
        "generate",
        900 + attempt,
        phase="probe",
        label=f"canary {when} {attempt}",
        at=100.0 * attempt,
        lasts=lasts,
        deadline=60.0,
        max_new_tokens=8,
        reply=Reply(finish=finish, **reply),
    )


def test_a_dead_canary_on_a_healthy_server_is_stuck() -> None:
    facts = facts_of([canary("timeout", 1), canary("timeout", 2)], samples=[sample(t=230.0)])
    (finding,) = judge_liveness(facts)
    assert (finding.kind, finding.status) == ("K23", "stuck")
    assert any("answers control calls" in line for line in finding.evidence)


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        ([canary("timeout", 1), canary("length", 2, lasts=2.0)], {}),
        ([canary("timeout", 1), canary("timeout", 2)], {"client_lag": 5.0}),
        ([canary("length", 1, "before", lasts=40.0), canary("timeout", 2)], {}),
        ([canary("timeout", 1, events=3, output_ids=[1, 2, 3])], {}),
    ],
)
def test_a_slow_canary_is_inconclusive(records: list[OpRecord], fields: dict[str, Any]) -> None:
    assert kinds(judge_liveness(facts_of(records, **fields))) == [("K23", "inconclusive")]


def test_a_canary_that_finishes_is_quiet_and_a_dead_server_is_not_judged() -> None:
    assert judge_liveness(facts_of([canary("length", lasts=50.0)])) == []
    assert judge_liveness(facts_of([canary("error")], server=ServerFacts(alive=False))) == []


def served(number: int, at: float, wait: float = 0.2, lasts: float = 1.0) -> OpRecord:
    reply = Reply(finish="length", output_ids=[1])
    return op_record(
        "generate", number, at=at, lasts=lasts, first=at + wait, reply=reply, label=f"plain {number}"
    )


def twice(cached: int) -> list[OpRecord]:
    """A prompt of eight tokens, and the same one later, of which so many were cached."""
    return [
        op_record(
            "generate", at, at=at * 5.0, input_ids=tuple(range(20, 28)),
            reply=Reply(finish="length", output_ids=[1], cached_tokens=cached if at else 0),
        )
        for at in range(2)
    ]  # fmt: skip


def starving(number: int = 50, at: float = 1.0, lasts: float = 60.0, **fields: Any) -> OpRecord:
    reply = Reply(finish="timeout", output_ids=fields.pop("output_ids", []))
    return op_record("turn", number, session="s", label="s turn 2", at=at, lasts=lasts, reply=reply, **fields)


def test_a_request_that_others_overtake_for_long_is_stuck() -> None:
    records = [*(served(n, 2.0 + n) for n in range(30)), starving()]
    (finding,) = judge_liveness(facts_of(records))
    assert (finding.kind, finding.status, finding.owner) == ("K08", "stuck", "s turn 2")
    assert "30 others were served meanwhile" in finding.headline


def test_a_silence_of_everybody_is_stuck() -> None:
    records = [served(1, 0.0), *(starving(n, at=5.0) for n in range(50, 54))]
    (finding,) = judge_liveness(facts_of(records))
    assert (finding.kind, finding.status) == ("K08", "stuck")
    assert "4 requests" in finding.paragraph()


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        # Served all the time, only slowly.
        ([served(1, 0.0, wait=10.0, lasts=12.0), starving(first=20.0, output_ids=[1, 2])], {}),
        # A slow server: everybody waits for long.
        ([*(served(n, 0.0, wait=20.0, lasts=25.0) for n in range(4)), starving(lasts=30.0)], {}),
        # A client that did not read.
        ([*(served(n, 2.0 + n) for n in range(30)), starving(lag=4.0)], {}),
    ],
)
def test_a_slow_server_or_a_starved_client_is_inconclusive(
    records: list[OpRecord], fields: dict[str, Any]
) -> None:
    assert kinds(judge_liveness(facts_of(records, **fields))) == [("K08", "inconclusive")]


def test_a_server_that_never_rests_has_a_zombie() -> None:
    gone = op_record("turn", 3, session="s", label="s turn 1", reply=Reply(finish="disconnected"))
    facts = facts_of([gone], idle_reached=False, idle_wait=60.0, idle=sample(running=1))
    (finding,) = judge_liveness(facts)
    assert (finding.kind, finding.status, finding.owner) == ("K04", "stuck", "s turn 1")
    for fields in ({"idle_wait": 3.0}, {"server": ServerFacts(attached=True)}, {"idle": None}):
        for name, value in fields.items():
            setattr(facts, name, value)
        assert [f.status for f in judge_liveness(facts)] == ["inconclusive"]


# --- exercise ------------------------------------------------------------------------------------------
def exercised(records: list[OpRecord], *must: str, **fields: Any) -> tuple[list[Any], CaseFacts]:
    facts = facts_of(records, plan=Plan(workload="w", seed=0, operations=(), must_exercise=must), **fields)
    return judge_exercise(facts), facts


def test_what_was_not_seen_is_named_with_the_way_to_reach_it() -> None:
    (finding,), _ = exercised(turns({}, {}), "cached_turn", "retract", "abort_mid_decode")
    assert finding.status == "unexercised"
    assert "retract, abort_mid_decode" in finding.headline
    assert "retract interval" in finding.next_step
    assert "cached_turn 1" in finding.paragraph()


def test_a_cell_may_excuse_it_and_an_unknown_name_is_said() -> None:
    optional = make_cell()
    object.__setattr__(optional, "exercise", "optional")
    assert exercised([], "retract", cell=optional)[0] == []
    assert exercised([], "retract", promises=promises(lacks={"retract": "no retraction"}))[0] == []
    (finding,), _ = exercised([], "telepathy")
    assert finding.status == "inconclusive"
    assert "telepathy" in finding.headline


@pytest.mark.parametrize(
    ("name", "records", "fields"),
    [
        ("retract", turns({"retractions": 2}), {}),
        ("retract", [], {"log": [event("retract", "Testing retraction", count=3)]}),
        ("retract", [], {"baseline": sample(retracted_total=4), "idle": sample(retracted_total=6)}),
        (
            "chunked_prefill",
            [op_record("generate", 1, input_ids=tuple(range(600)), reply=Reply(finish="length"))],
            {},
        ),
        (
            "mixed_chunk",
            [served(1, 0.0, lasts=5.0), served(2, 2.0)],
            {"cell": make_cell(mixed_chunk=True)},
        ),
        ("abort_mid_decode", [*turns(dict(ABORT)), op_record("abort", 9, target=0, shown=3, at=0.5)], {}),
        (
            "abort_queued",
            [
                op_record("turn", 0, session="s", reply=Reply(finish="abort"), lasts=5.0),
                op_record("abort", 9, target=0, shown=0, at=0.5),
            ],
            {},
        ),
        ("reject", turns({}, dict(REJECT)), {}),
        (
            "disconnect",
            [
                *turns({"finish": "disconnected", "shown": 2}),
                op_record("disconnect", 9, target=0, shown=2, at=0.5),
            ],
            {},
        ),
        ("close_in_flight", [*turns({}), op_record("close", 9, session="s", at=0.5, lasts=0.1)], {}),
        ("cached_turn", turns({}, {}), {}),
        ("cached_prefix", [op_record("generate", 1, reply=Reply(finish="length", cached_tokens=9))], {}),
        ("evicted_prefix", twice(cached=0), {}),
        ("speculation", turns({"spec_verify_steps": 3}), {}),
        (
            "session_timeout",
            [
                op_record("open", 1, session="s", timeout=2.0, reply=Reply(finish="stop", session_id="x")),
                *turns({}),
                op_record("wait", 2, at=1.0, lasts=9.0, seconds=9.0),
            ],
            {},
        ),
        ("concurrency", [served(1, 0.0), served(2, 0.5)], {}),
    ],
)
def test_each_thing_is_counted_when_it_happens_and_only_then(
    name: str, records: list[OpRecord], fields: dict[str, Any]
) -> None:
    found, facts = exercised(records, name, **fields)
    assert found == []
    assert facts.exercised[name] > 0
    quiet, _ = exercised([served(1, 0.0)], name)
    assert [f.status for f in quiet] == ["unexercised"]


def test_a_prompt_that_is_still_cached_was_not_evicted() -> None:
    _, facts = exercised(twice(cached=7), "evicted_prefix")
    assert facts.exercised["evicted_prefix"] == 0


def test_retractions_of_nobody_do_not_count() -> None:
    assert COUNTERS["retract"][0](facts_of([], log=[event("retract", "Testing retraction", count=0)])) == 0


# --- protocol ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("record", "kind", "status", "says"),
    [
        (served(1, 0.0), "", "", ""),
        (
            changed(served(1, 0.0), faults=["the stream ended after 3 tokens without its end mark"]),
            "K19",
            "mismatch",
            "end mark",
        ),
        (
            changed(served(1, 0.0), faults=["the output log-prob at position 3 is missing or NaN"]),
            "K18",
            "mismatch",
            "NaN",
        ),
        (
            changed(served(1, 0.0), finish="error", http_status=500, message="boom"),
            "K00",
            "crash",
            "HTTP 500: boom",
        ),
        (
            changed(served(1, 0.0), finish="error", message="connection reset"),
            "K19",
            "mismatch",
            "connection reset",
        ),
        (changed(served(1, 0.0), finish="error", message="not sent: session s is not open"), "", "", ""),
        (
            changed(served(1, 0.0), finish="abort", message="out of room"),
            "K19",
            "mismatch",
            "nothing asked for it",
        ),
        (
            op_record(
                "turn", 1, session="s", expect="reject", input_ids=(1,) * 600, reply=Reply(finish="length")
            ),
            "K19",
            "mismatch",
            "must refuse",
        ),
        (
            op_record("open", 1, session="s", reply=Reply(finish="rejected", http_status=400)),
            "K09",
            "mismatch",
            "not opened",
        ),
    ],
)
def test_replies_that_break_the_protocol(record: OpRecord, kind: str, status: str, says: str) -> None:
    found = judge_protocol(facts_of([record]))
    assert kinds(found) == ([(kind, status)] if kind else [])
    assert all(says in finding.headline for finding in found)


def aborted_run(ran_on: int, seconds: float, **reply: Any) -> list[OpRecord]:
    output = list(range(5 + ran_on))
    return [
        op_record("abort", 2, target=1, shown=5, at=1.0, lasts=0.1),
        op_record("generate", 1, expect="abort", max_new_tokens=reply.pop("asked", len(output)), lasts=seconds,
                  reply=Reply(finish="length", output_ids=output)),
    ]  # fmt: skip


def test_an_abort_that_is_not_heard_is_found_and_a_race_is_not() -> None:
    assert kinds(judge_protocol(facts_of(aborted_run(200, 60.0)))) == [("K03", "mismatch")]
    assert judge_protocol(facts_of(aborted_run(10, 2.0))) == []
    assert judge_protocol(facts_of(aborted_run(200, 60.0), client_lag=5.0)) == []
    assert kinds(judge_protocol(facts_of(aborted_run(10, 2.0, asked=64)))) == [("K19", "mismatch")]


def test_what_broke_off_with_a_dead_server_is_told_once() -> None:
    broken = [changed(served(n, 0.0), finish="error", message="connection reset") for n in range(5)]
    found = judge(facts_of(broken, server=ServerFacts(alive=False, exit_code=-9), idle=None))
    assert kinds(found) == [("K00", "crash")]


# --- all of them ---------------------------------------------------------------------------------------
def test_an_oracle_that_fails_costs_no_other_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: CaseFacts) -> list[Any]:
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(ORACLES, "liveness", broken)
    found = judge(facts_of(turns({}, {"prompt_tokens": 47})))
    assert kinds(found) == [("K02", "mismatch"), ("K00", "inconclusive")]


def test_findings_stand_gravest_first() -> None:
    facts = facts_of(turns({}, {"prompt_tokens": 47}), idle=sample(gauges(used=9)))
    facts.server = ServerFacts(stopped=True, port_still_open=True)
    assert [f.status for f in judge(facts)] == ["leak", "mismatch", "residue"]


def test_probes_fit_their_cell_and_repeat_nothing() -> None:
    cell = make_cell(max_running=8, pool_tokens=4096)
    assert len(row_probe_plan(cell, VOCAB, 1).operations) == 8
    assert row_probe_plan(make_cell(max_running=8, pool_tokens=64), VOCAB, 1).operations == ()
    first, second = (canary_plan(cell, VOCAB, 1, attempt=n).operations[0] for n in (1, 2))
    assert first.input_ids != second.input_ids
    assert first.id != second.id
    engine = Simulated()
    assert engine.run(row_probe_plan(cell, VOCAB, 1).operations, "probe")
    paced = row_probe_plan(cell, VOCAB, 1, attempt=3).operations
    asked, waits = [op for op in paced if op.generates], [op for op in paced if op.kind == "barrier"]
    assert [op.after for op in asked] == [(), *((wait.id,) for wait in waits[:-1])]
    assert [(op.target, op.when_tokens) for op in waits] == [(op.id, 1) for op in asked]
    assert {op.max_new_tokens for op in asked} == {96}


def test_a_plan_from_the_builder_runs_clean_through_every_oracle() -> None:
    plan = PlanBuilder("t", 0, VOCAB)
    plan.open("s")
    plan.turn("s", 20, 8)
    plan.turn("s", 20, 8)
    plan.close("s")
    engine = Simulated()
    engine.run(plan.operations, "workload")
    assert judge(facts_of(engine.records)) == []


# --- aborts that nobody heard --------------------------------------------------------------------------
def aborted_requests(*ran: int, finish: str = "length", lasted: float = 3.0) -> list[OpRecord]:
    """Requests of 256 tokens, each aborted at its fourth; ``ran`` tells how many tokens came all the same."""
    records = []
    for at, shown in enumerate(ran):
        records.append(
            op_record(
                "abort", 100 + at, target=at, when_tokens=4, at=10.0 * at + 0.2,
                shown=4, lasts=0.01, reply=Reply(finish="stop", http_status=200),
            )
        )  # fmt: skip
        end: Any = finish if shown == 256 else "abort"
        records.append(
            op_record(
                "generate", at, input_ids=(5, 6), max_new_tokens=256, expect="either", label=f"target {at}",
                at=10.0 * at, first=10.0 * at + 0.1, lasts=lasted,
                reply=Reply(finish=end, http_status=200, output_ids=list(range(shown))),
            )
        )  # fmt: skip
    return records


def test_aborts_that_never_stop_anything_are_named() -> None:
    found = judge_protocol(facts_of(aborted_requests(256, 256, 256)))
    assert kinds(found) == [("K03", "mismatch")]
    assert "252 tokens after it was aborted" in found[0].headline
    assert "K04" in found[0].also


@pytest.mark.parametrize(
    "records",
    [
        aborted_requests(256, 5, 256),  # one abort worked: the others lost a race
        aborted_requests(256),  # a single race
        aborted_requests(256, 256, lasted=0.3),  # over before anybody could have heard
    ],
)
def test_aborts_that_lose_a_race_are_legal(records: list[OpRecord]) -> None:
    assert judge_protocol(facts_of(records)) == []


@pytest.mark.parametrize(("cached", "kind"), [(55, ""), (52, ""), (40, ""), (27, ""), (26, "K25")])
def test_a_turn_behind_a_retracted_one_may_compute_that_ones_tokens_again(cached: int, kind: str) -> None:
    found = judge_session_arithmetic(facts_of(turns({}, {"retractions": 3}, {"cached_tokens": cached})))
    assert kinds(found) == ([(kind, "mismatch")] if kind else [])


def test_what_a_turn_computed_again_is_there_for_the_one_after_it() -> None:
    found = judge_session_arithmetic(facts_of(turns({}, {"retractions": 3}, {}, {"cached_tokens": 60})))
    assert kinds(found) == [("K25", "mismatch")]
