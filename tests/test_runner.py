from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web
from client_helpers import FakeEngine, cell, drain
from fake_server import FakeServer
from oracle_helpers import facts_of

from pytest_kvcheck.operations import OVERLAP, Operation
from pytest_kvcheck.oracles.protocol import judge_protocol
from pytest_kvcheck.oracles.session_arithmetic import judge_session_arithmetic
from pytest_kvcheck.trace import OpRecord, TraceHeader, TraceWriter, read_trace
from pytest_kvcheck.workloads import make_plan
from pytest_kvcheck.workloads.plan import PlanBuilder
from pytest_kvcheck.workloads.runner import Runner


def builder() -> PlanBuilder:
    return PlanBuilder("test", 1, 512)


def by_label(records: list[OpRecord]) -> dict[str, OpRecord]:
    return {record.op.label: record for record in records}


def test_turns_build_on_what_the_session_showed() -> None:
    plan = builder()
    plan.open("a")
    for turn in range(3):
        plan.turn("a", 5, 4, label=f"turn {turn}")
    plan.close("a")
    with FakeServer() as server:
        runner = Runner(FakeEngine(), server.url)
        records = by_label(runner.run(plan.operations))
    assert [records[f"turn {turn}"].history for turn in range(3)] == [0, 9, 18]
    assert [records[f"turn {turn}"].reply.prompt_tokens for turn in range(3)] == [5, 14, 23]
    assert records["a open"].reply.finish == records["a close"].reply.finish == "stop"
    assert not runner.sessions["a"].ledger.open
    turn = records["turn 0"]
    assert turn.first_token is not None
    assert turn.started <= turn.first_token <= turn.ended
    assert turn.started_seq < turn.ended_seq
    rids = {record.rid for record in records.values() if record.rid}
    assert {len(rid) for rid in rids} == {32}
    assert len(rids) == 3


def test_what_came_late_beside_a_turn_has_that_turn_in_its_history() -> None:
    """As seen on a clean engine: it was done with a turn whose last event the client had not read yet."""
    plan = builder()
    plan.open("a")
    turn = plan.turn("a", 5, 4, label="turn")
    plan.turn("a", 1, 20, expect="reject", invalid=OVERLAP, target=turn, when_tokens=3, label="late")
    plan.fence()
    plan.turn("a", 2, 2, label="next")
    how = {5: "late", 1: "slow", 2: "ok"}
    with FakeServer(lambda body: how[len(body["input_ids"])]) as server:
        runner = Runner(FakeEngine(), server.url)
        records = runner.run(plan.operations)
    facts = facts_of(records)
    assert judge_protocol(facts) == []
    assert judge_session_arithmetic(facts) == []
    found = by_label(records)
    assert found["late"].reply.prompt_tokens == 10
    assert [found[label].history for label in ("turn", "late", "next")] == [0, 9, 30]


def test_all_turns_of_a_round_are_in_flight_at_once() -> None:
    plan = builder()
    names = [f"s{at}" for at in range(20)]
    for name in names:
        plan.open(name)
    plan.fence()
    for name in names:
        plan.turn(name, 3, 20)
    plan.fence()
    with FakeServer(lambda body: "slow") as server:
        records = Runner(FakeEngine(), server.url).run(plan.operations)
        assert server.peak == 20
    assert {record.reply.finish for record in records} == {"length", "stop"}


def test_order_is_kept_and_every_record_is_in_the_trace(tmp_path: Path) -> None:
    plan = make_plan("logprob-concurrent", cell(), vocab_size=512, seed=3, scale=0.1)
    path = tmp_path / "trace.jsonl"
    with FakeServer() as server, TraceWriter(path, TraceHeader()) as trace:
        records = Runner(FakeEngine(), server.url, trace=trace).run(plan.operations)
    ended = {record.op.id: record.ended_seq for record in records}
    assert all(record.started_seq > ended[earlier] for record in records for earlier in record.op.after)
    written = [line for line in read_trace(path) if isinstance(line, OpRecord)]
    assert written == records
    assert len(records) == len(plan.operations)


@pytest.mark.parametrize("can_abort", [True, False])
def test_an_abort_comes_at_its_token_and_the_session_goes_on_from_before(can_abort: bool) -> None:
    plan = builder()
    plan.open("a")
    plan.turn("a", 5, 4, label="first")
    target = plan.turn("a", 5, 4000, expect="either", label="long")
    plan.abort(target, 3)
    plan.fence()
    plan.turn("a", 5, 4, label="next")
    with FakeServer(lambda body: "slow") as server:
        records = by_label(Runner(FakeEngine(can_abort), server.url).run(plan.operations))
    assert records["long"].reply.finish == ("abort" if can_abort else "disconnected")
    shown = records["abort at 3 tokens"].shown_at_action
    assert shown is not None
    assert 3 <= shown < 4000
    assert records["next"].history == 9
    assert records["next"].reply.prompt_tokens == 14


def test_an_abort_that_comes_too_late_says_so_and_is_not_sent() -> None:
    plan = builder()
    target = plan.generate(5, 4)
    plan.abort(target, 100)
    with FakeServer() as server:
        records = Runner(FakeEngine(), server.url).run(plan.operations)
        assert [call for call, _ in server.calls] == []
    late = next(record for record in records if record.op.kind == "abort")
    assert late.shown_at_action is None
    assert late.reply.message == "not sent: the target had ended"


def test_an_abort_before_the_first_token_waits_until_the_server_has_the_request() -> None:
    plan = builder()
    plan.abort(plan.generate(5, 4, expect="either", deadline=60.0), 0)
    seen: list[str] = []

    def behave(body: dict[str, object]) -> str:
        seen.append(str(body["rid"]))
        return "slow"

    with FakeServer(behave) as server:
        records = Runner(FakeEngine(), server.url).run(plan.operations)
        aborted = [body["rid"] for call, body in server.calls if call == "abort"]
    assert aborted == seen
    assert next(record for record in records if record.op.kind == "abort").shown_at_action in range(4)


def test_abort_everything() -> None:
    plan = builder()
    busy = [plan.generate(5, 4000, expect="abort", label=f"busy {at}") for at in range(3)]
    plan.hold([plan.running(each) for each in busy])
    operations = [*plan.operations, Operation(id=99, kind="abort", after=(plan.operations[-1].id,))]
    with FakeServer(lambda body: "slow") as server:
        records = Runner(FakeEngine(), server.url).run(operations)
    assert [record.reply.finish for record in records if record.op.generates] == ["abort"] * 3


def test_a_close_in_flight_does_not_wait_for_its_turn() -> None:
    plan = builder()
    plan.open("a")
    turn = plan.turn("a", 5, 60, label="turn")
    plan.close("a", target=turn, when_tokens=2)
    with FakeServer(lambda body: "slow") as server:
        records = Runner(FakeEngine(), server.url).run(plan.operations)
    ended = [record.op.kind for record in records]
    assert ended == ["open", "close", "turn"]
    assert records[1].shown_at_action is not None


def test_a_disconnect_leaves_the_server() -> None:
    plan = builder()
    plan.disconnect(plan.generate(5, 5000, label="long"), 2)
    with FakeServer(lambda body: "slow") as server:
        records = by_label(Runner(FakeEngine(), server.url).run(plan.operations))
    assert records["long"].reply.finish == "disconnected"
    assert len(records["long"].reply.output_ids) >= 2


def test_a_session_that_does_not_open_loses_its_turns_and_no_others() -> None:
    plan = builder()
    for name in ("a", "b"):
        plan.open(name)
        plan.turn(name, 5, 4, label=f"{name} turn")
        plan.close(name)
    with FakeServer() as server:
        first: list[str] = []

        def refuse(body: dict[str, str]) -> web.Response:
            first.append(body["session_id"])
            if len(first) == 1:
                return web.Response(status=400, text="sessions are off")
            server.sessions[body["session_id"]] = []
            return web.json_response(body["session_id"])

        server.open_reply = refuse
        records = by_label(Runner(FakeEngine(), server.url).run(plan.operations))
    finishes = {records[f"{name} turn"].reply.finish for name in ("a", "b")}
    assert finishes == {"error", "length"}
    lost = next(record for record in records.values() if record.reply.finish == "error")
    assert "is not open: HTTP 400: sessions are off" in lost.reply.message


def test_a_failing_adapter_costs_one_operation() -> None:
    class Broken(FakeEngine):
        def reply_parser(self, op, history):  # type: ignore[no-untyped-def]
            if op.label == "bad":
                raise RuntimeError("no such field")
            return super().reply_parser(op, history)

    plan = builder()
    plan.generate(5, 4, label="good")
    plan.generate(5, 4, label="bad")
    plan.fence()
    plan.generate(5, 4, label="later")
    with FakeServer() as server:
        records = by_label(Runner(Broken(), server.url).run(plan.operations))
    assert records["bad"].reply.message == "kvcheck failed: RuntimeError: no such field"
    assert records["good"].reply.finish == records["later"].reply.finish == "length"


def test_a_budget_ends_what_hangs_and_what_was_not_sent() -> None:
    plan = builder()
    plan.open("a")
    plan.turn("a", 5, 4, label="hangs")
    plan.wait(1000.0, label="long wait")
    plan.fence()
    plan.generate(5, 4, label="never sent")
    with FakeServer(lambda body: "hang") as server:
        records = by_label(Runner(FakeEngine(), server.url).run(plan.operations, budget=1.0))
        assert len(server.bodies) == 1
    assert records["hangs"].reply.finish == "timeout"
    assert records["never sent"].reply.finish == "timeout"
    assert records["never sent"].reply.message == "not sent: the plan's budget of 1 s was spent"


def test_a_stuck_server_costs_one_deadline_and_not_one_an_operation() -> None:
    plan = builder()
    plan.generate(5, 4, label="fine")
    plan.fence()
    for at in range(3):
        plan.generate(5, 4, label=f"stuck {at}", deadline=1.0 if at == 0 else 3000.0)
    plan.fence()
    plan.generate(5, 4, label="never sent", deadline=3000.0)
    with FakeServer(lambda body: "ok" if len(server.bodies) < 2 else "hang") as server:
        records = by_label(Runner(FakeEngine(), server.url).run(plan.operations))
        assert len(server.bodies) == 4
    assert records["stuck 0"].reply.message == "no reply, then nothing more within 1 s"
    assert "the server is stuck: no request showed a token for" in records["stuck 1"].reply.message
    assert {records[f"stuck {at}"].reply.finish for at in range(3)} == {"timeout"}
    assert records["never sent"].reply.finish == "timeout"
    assert records["never sent"].reply.message.startswith("not sent: the server is stuck")


def test_one_hanging_request_beside_others_that_go_on_stops_nothing() -> None:
    plan = builder()
    plan.generate(5, 4, label="hangs", deadline=1.0)
    plan.generate(6, 200, label="goes on")
    plan.fence()
    plan.generate(7, 4, label="later")
    with FakeServer(lambda body: "hang" if len(body["input_ids"]) == 5 else "slow") as server:
        records = by_label(Runner(FakeEngine(), server.url).run(plan.operations))
    assert records["hangs"].reply.finish == "timeout"
    assert records["goes on"].reply.finish == records["later"].reply.finish == "length"


def test_a_dead_server_ends_the_plan_at_once() -> None:
    plan = builder()
    for _ in range(3):
        plan.generate(5, 4, deadline=3000.0)
        plan.fence()
    alive = threading.Event()
    alive.set()

    def behave(body: dict[str, object]) -> str:
        alive.clear()
        return "hang"

    with FakeServer(behave) as server:
        records = Runner(FakeEngine(), server.url, alive=alive.is_set).run(plan.operations)
    requests = [record for record in records if record.op.generates]
    assert len(requests) == 3
    assert all(record.reply.finish == "error" for record in requests)
    assert all("server died" in record.reply.message for record in requests)


def test_an_interrupt_keeps_what_happened(tmp_path: Path) -> None:
    plan = builder()
    plan.generate(5, 4, label="done")
    plan.fence()
    plan.generate(5, 4, label="hangs", deadline=3000.0)
    path = tmp_path / "trace.jsonl"
    hung = threading.Event()

    def behave(body: dict[str, object]) -> str:
        if len(server.bodies) < 2:
            return "ok"
        hung.set()
        return "hang"

    def interrupt() -> None:
        hung.wait(60)
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    with FakeServer(behave) as server, TraceWriter(path, TraceHeader()) as trace:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            Runner(FakeEngine(), server.url, trace=trace).run(plan.operations)
    written = {line.op.label: line for line in read_trace(path) if isinstance(line, OpRecord)}
    assert written["done"].reply.finish == "length"
    assert written["hangs"].reply.message == "interrupted"


def test_a_full_disk_is_told_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = builder()
    plan.generate(5, 4)
    with FakeServer() as server, TraceWriter(tmp_path / "trace.jsonl", TraceHeader()) as trace:

        def full(line: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(trace, "write", full)
        with pytest.raises(OSError, match="No space left"):
            Runner(FakeEngine(), server.url, trace=trace).run(plan.operations)


def test_sessions_live_on_into_the_drain_which_closes_them() -> None:
    plan = builder()
    plan.open("kept")
    plan.turn("kept", 5, 4)
    plan.open("timed", timeout=1.0)
    plan.open("closed")
    plan.close("closed")
    with FakeServer() as server:
        runner = Runner(FakeEngine(), server.url)
        records = runner.run(plan.operations)
        closes = drain(records)
        assert [op.session for op in closes] == ["kept"]
        drained = runner.run(closes, phase="drain")
        assert [(record.phase, record.reply.finish) for record in drained] == [("drain", "stop")]
        assert len(server.sessions) == 1  # the one that the server must forget by itself
    assert drain([*records, *drained]) == ()


def test_flush_reports_a_refusal() -> None:
    busy = Operation(id=0, kind="generate", input_ids=(11,), max_new_tokens=30)
    flush = Operation(id=1, kind="barrier", target=0, when_tokens=1)
    now = Operation(id=2, kind="flush", after=(1,))
    with FakeServer(lambda body: "slow") as server:
        records = Runner(FakeEngine(), server.url).run([busy, flush, now])
    assert next(record for record in records if record.op.kind == "flush").reply.finish == "rejected"


def test_a_runner_works_inside_an_event_loop() -> None:
    plan = builder()
    plan.generate(5, 4)

    async def run(url: str) -> list[OpRecord]:
        return await Runner(FakeEngine(), url).run_async(plan.operations)

    with FakeServer() as server:
        assert [record.reply.finish for record in asyncio.run(run(server.url))] == ["length"]
