"""Drives a plan against a server and writes down what happened, operation by operation, while it happens."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pytest_kvcheck.client.calls import Call, Protocols
from pytest_kvcheck.client.http import Flight, LoadClient
from pytest_kvcheck.client.lag import LagMonitor
from pytest_kvcheck.ledger import SessionLedger
from pytest_kvcheck.operations import OVERLAP, Operation
from pytest_kvcheck.trace import Clock, Finish, OpRecord, Phase, Reply, TraceWriter
from pytest_kvcheck.workloads.plan import check_plan

SUPERVISE_EVERY = 0.25


@dataclass(slots=True)
class _Session:
    """A session of this run: the server's id for it, and what the client has seen of it."""

    server_id: str
    ledger: SessionLedger
    unopened: str = ""  # why it could not be opened


@dataclass(slots=True)
class Runner:
    """Runs plans, one after another, against one server; sessions stay known from one run to the next.

    Every record goes to ``trace`` as its operation ends. ``alive`` tells whether the server's process lives:
    once it does not, what is left of a plan is recorded as "server died" at once. ``client_lag`` is the
    greatest delay of the client's own event loop so far, in seconds. ``patience`` in seconds cuts every
    operation's own deadline.

    In records, operations that are no requests (open, close, abort, wait ...) end as "stop" when they went
    well. Any operation with a ``target`` starts once that request has shown ``when_tokens`` or has ended; a
    score's target only says what is scored.
    """

    engine: Protocols
    base_url: str
    clock: Clock = field(default_factory=Clock)
    trace: TraceWriter | None = None
    alive: Callable[[], bool] | None = None
    client_lag: float = 0.0
    patience: float = float("inf")
    sessions: dict[str, _Session] = field(default_factory=dict)

    def run(
        self, operations: Sequence[Operation], *, phase: Phase = "workload", budget: float | None = None
    ) -> list[OpRecord]:
        """Run a plan to its end; the records stand in the order in which operations ended.

        ``budget`` in seconds bounds the whole plan: what has not ended by then is recorded as "timeout".
        Raises ``ValueError`` for a plan that makes no sense, ``OSError`` where the trace cannot be written,
        ``KeyboardInterrupt`` after a clean stop.
        """
        return asyncio.run(self.run_async(operations, phase=phase, budget=budget))

    async def run_async(
        self, operations: Sequence[Operation], *, phase: Phase = "workload", budget: float | None = None
    ) -> list[OpRecord]:
        """:meth:`run` for callers that have an event loop."""
        check_plan(operations, self.sessions)
        async with LoadClient(self.base_url) as client, LagMonitor(self.clock) as lag:
            run = _Run(self, operations, phase, budget, client, lag)
            try:
                return await run.execute()
            finally:
                self.client_lag = max(self.client_lag, lag.worst())


class _Run:
    """One plan under way."""

    def __init__(
        self,
        runner: Runner,
        operations: Sequence[Operation],
        phase: Phase,
        budget: float | None,
        client: LoadClient,
        lag: LagMonitor,
    ) -> None:
        self._runner, self._engine, self._clock = runner, runner.engine, runner.clock
        self._phase, self._client, self._lag = phase, client, lag
        self._operations = {op.id: op for op in operations}
        self._flights = {op.id: Flight(runner.clock.now) for op in operations}
        self._missing = {op.id: len(set(op.after)) for op in operations}
        self._dependents: dict[int, list[int]] = {op.id: [] for op in operations}
        for op in operations:
            for earlier in set(op.after):
                self._dependents[earlier].append(op.id)
        self._budget = budget
        self._ends = float("inf") if budget is None else runner.clock.now() + budget
        self._stop: tuple[Finish, str] | None = None
        self._stopped = asyncio.Event()
        self._cancelled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._rids: dict[int, str] = {}
        self._records: list[OpRecord] = []
        self._failure: OSError | None = None
        self._done = asyncio.Event()

    async def execute(self) -> list[OpRecord]:
        try:
            for number, missing in self._missing.items():
                if not missing:
                    self._start(number)
            while len(self._records) < len(self._operations) and self._failure is None:
                self._supervise()
                try:
                    async with asyncio.timeout(SUPERVISE_EVERY):
                        await self._done.wait()
                except TimeoutError:
                    pass
        finally:
            self._cancelled = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        return self._records

    def _supervise(self) -> None:
        """Stop the plan when its budget is spent or its server is dead."""
        if self._runner.alive is not None and not self._runner.alive():
            self._halt("error", "server died")
        elif self._clock.now() >= self._ends:
            self._halt("timeout", f"the plan's budget of {self._budget:g} s was spent")

    def _halt(self, finish: Finish, why: str) -> None:
        """End everything that is under way, and send nothing more; what is left is recorded with the reason."""
        if self._stop is not None:
            return
        self._stop = (finish, why)
        self._stopped.set()
        for flight in self._flights.values():
            flight.cut(finish, why)

    def _check_stuck(self, record: OpRecord) -> None:
        """Stop when no request at all showed a token in the whole time that one had: each of the others would
        only wait for its deadline as well.
        """
        took = record.ended - record.started
        shown = (flight.last_shown for flight in self._flights.values() if flight.last_shown is not None)
        if (
            record.op.generates
            and took >= self._patience(record.op)
            and max(shown, default=0.0) <= record.started
        ):
            self._halt("timeout", f"the server is stuck: no request showed a token for {took:.0f} s")

    def _start(self, number: int) -> None:
        task = asyncio.create_task(self._operate(self._operations[number]), name=f"kvcheck-op-{number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _operate(self, op: Operation) -> None:
        flight = self._flights[op.id]
        record = OpRecord(op=op, phase=self._phase, started=self._clock.now(), started_seq=self._clock.tick())
        try:
            record.reply = await self._perform(op, record, flight)
        except asyncio.CancelledError:
            record.reply = Reply(finish="error", message="interrupted")
            raise
        except Exception as problem:  # our own fault or the adapter's: the other operations go on
            record.reply = Reply(finish="error", message=f"kvcheck failed: {type(problem).__name__}: {problem}")
        finally:
            flight.end()
            self._conclude(record, flight)

    def _conclude(self, record: OpRecord, flight: Flight) -> None:
        record.first_token = flight.first_shown
        record.ended, record.ended_seq = record.ended or self._clock.now(), self._clock.tick()
        record.client_lag = self._lag.worst(record.started)
        if record.op.session in self._runner.sessions:
            self._runner.sessions[record.op.session].ledger.apply(record)
        self._records.append(record)
        try:
            if self._runner.trace is not None:
                self._runner.trace.write(record)
        except OSError as problem:  # a full disk: without a trace there is nothing to judge
            self._failure = problem
            self._done.set()
        if self._cancelled:
            return
        if record.reply.finish == "timeout":
            self._check_stuck(record)
        for dependent in self._dependents[record.op.id]:
            self._missing[dependent] -= 1
            if not self._missing[dependent]:
                self._start(dependent)
        if len(self._records) == len(self._operations):
            self._done.set()

    async def _perform(self, op: Operation, record: OpRecord, flight: Flight) -> Reply:
        if op.target is not None and op.kind != "score":
            target = self._flights[op.target]
            in_time = await target.reached(op.when_tokens)
            record.shown_at_action = target.shown if in_time else None
            record.started, record.started_seq = self._clock.now(), self._clock.tick()
            if op.kind in ("abort", "disconnect") and not in_time:
                return Reply(finish="stop", message="not sent: the target had ended")
        if self._stop is not None:
            return Reply(finish=self._stop[0], message=f"not sent: {self._stop[1]}")
        if op.generates:
            return await self._request(op, record, flight)
        match op.kind:
            case "open":
                return await self._open(op, flight)
            case "close":
                known = self._runner.sessions.get(str(op.session))
                call = self._engine.close_call(known.server_id if known else secrets.token_hex(16))
                return Reply(finish="stop") if call is None else await self._call(op, flight, call)
            case "abort":
                return await self._abort(op, flight)
            case "disconnect":
                target.cut("disconnected", f"the client left at {target.shown} tokens")
            case "flush":
                return await self._call(op, flight, self._engine.flush_call())
            case "wait":
                try:
                    async with asyncio.timeout(op.seconds):
                        await self._stopped.wait()
                except TimeoutError:
                    pass
        return Reply(finish="stop")

    def _deadline(self, op: Operation) -> float:
        return min(self._patience(op), self._ends - self._clock.now())

    def _patience(self, op: Operation) -> float:
        return min(op.deadline, self._runner.patience)

    async def _request(self, op: Operation, record: OpRecord, flight: Flight) -> Reply:
        session = self._runner.sessions[str(op.session)] if op.kind == "turn" else None
        if session is not None and session.unopened:
            return Reply(
                finish="error", message=f"not sent: session {op.session} is not open: {session.unopened}"
            )
        # Engines match ids by prefix when they abort, so all have one length.
        record.rid = self._rids[op.id] = secrets.token_hex(16)
        history = [] if session is None else session.ledger.history
        record.history = len(history)
        call = self._engine.request_call(op, record.rid, session.server_id if session else None, history)
        parser = self._engine.reply_parser(op, len(history))
        reply = await self._client.request(
            call, parser, stream=op.stream, deadline=self._deadline(op), flight=flight
        )
        if op.invalid == OVERLAP and op.target is not None:
            # Where it was taken, the other turn was over: that one is its history, in the ledger too.
            record.ended = self._clock.now()
            await self._flights[op.target].reached(sys.maxsize)
            record.history = len(history)
        return reply

    async def _open(self, op: Operation, flight: Flight) -> Reply:
        name = str(op.session)
        session = _Session(secrets.token_hex(16), SessionLedger(name))
        self._runner.sessions[name] = session
        call = self._engine.open_call(op, session.server_id)
        if call is None:
            return Reply(finish="stop", session_id=session.server_id)
        reply, body = await self._client.call(call, self._deadline(op), flight)
        if reply.finish == "stop":
            try:
                answer = msgspec.json.decode(body) if body else session.server_id
            except msgspec.DecodeError:
                answer = None
            if isinstance(answer, str) and answer:
                session.server_id = answer
            elif answer is None:
                reply.finish, reply.message = "error", f"expected a session id, found {body[:200]!r}"
        if reply.finish != "stop":
            session.unopened = f"HTTP {reply.http_status}: {reply.message}"
            session.ledger.open = False
        reply.session_id = session.server_id
        return reply

    async def _abort(self, op: Operation, flight: Flight) -> Reply:
        if op.target is not None:
            targets, rid = [op.target], self._rids.get(op.target)
        else:
            targets, rid = [number for number, other in self._operations.items() if other.generates], None
        call = self._engine.abort_call(rid)
        if call is not None:
            return await self._call(op, flight, call)
        for number in targets:
            self._flights[number].cut(
                "disconnected", f"aborted by leaving at {self._flights[number].shown} tokens"
            )
        return Reply(finish="stop", message="by leaving: this engine has no abort call")

    async def _call(self, op: Operation, flight: Flight, call: Call) -> Reply:
        return (await self._client.call(call, self._deadline(op), flight))[0]
