"""A simulated engine for tests of oracles: exact counts, made-up log-probs, noise and faults to order.

It runs plans one level of ``after`` at a time; the operations of a level overlap. Nothing of it knows how the
oracles judge.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_kvcheck.cells import Cell, Features, Model, Position
from pytest_kvcheck.ledger import SessionLedger
from pytest_kvcheck.observe.logs import LogEvent
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.oracles.base import CaseFacts, Promises
from pytest_kvcheck.oracles.logprobs import suspects
from pytest_kvcheck.trace import GaugeSample, OpRecord, Phase, PoolGauge, Reply
from pytest_kvcheck.workloads.replay import confirm_plan, control_plan, replay_plan

VOCAB = 512


def make_cell(**features: Any) -> Cell:
    return Cell(
        name="cell",
        family="llama",
        engine="reference",
        model=Model(path="m"),
        features=Features(**features),
        at=Position("m.yaml", 1, 1),
    )


def promises(**fields: Any) -> Promises:
    fields.setdefault("streaming_sessions", True)
    fields.setdefault("expected_cached", lambda previous, sent: (previous - 1, previous))
    return Promises(**fields)


def gauges(used: int = 0, evictable: int = 0, total: int = 4096, pool: str = "full", **parts: int) -> PoolGauge:
    return PoolGauge(
        pool=pool, total=total, used=used, evictable=evictable, available=total - used - evictable, **parts
    )


def sample(*pools: PoolGauge, t: float = 0.0, **fields: Any) -> GaugeSample:
    fields = {"running": 0, "waiting": 0, "sessions": 0} | fields
    return GaugeSample(t=t, source="test", pools=list(pools) or [gauges()], **fields)


def facts_of(records: Iterable[OpRecord], cell: Cell | None = None, **fields: Any) -> CaseFacts:
    """A case at rest in perfect order, but for what ``fields`` says."""
    fields.setdefault("plan", Plan(workload="test", seed=0, operations=()))
    fields.setdefault("promises", promises())
    fields.setdefault("baseline", sample())
    fields.setdefault("idle", sample(t=1e6))
    return CaseFacts(cell=cell or make_cell(), records=list(records), **fields)


def event(
    meaning: Any, text: str, *, rule: str = "rule", kind: str = "", t: float = 0.0, line: int = 1, **found: Any
) -> LogEvent:
    return LogEvent(t, line, rule, meaning, kind, text, found)


def session_line(what: str, session: str) -> LogEvent:
    return event("session", what, rule=f"session-{what}", session=session)


def account(
    line: int, t: float, *, lost: int = 0, pool: str = "full", total: int = 1000, held: int = 0
) -> LogEvent:
    return event(
        "account",
        f"account {line}",
        t=t,
        line=line,
        pool=pool,
        total=total,
        available=total - held - lost,
        evictable=0,
        protected=0,
        session_held=held,
        uncached=0,
    )


# A delta for one log-prob: (random source, whether others ran beside it, operation, place in the output or -1).
Noise = Callable[[random.Random, bool, Operation, int], float]


def no_noise(source: random.Random, batched: bool, op: Operation, place: int) -> float:
    return 0.0


@dataclass
class Simulated:
    """The engine. ``decode`` and ``prefill`` are noises; ``fault`` is what is wrong, and nothing but workload
    requests meets it unless it says so itself (by the operation's label).
    """

    decode: Noise = no_noise
    prefill: Noise = no_noise
    fault: Noise = no_noise
    digits: int | None = None
    seed: int = 0
    now: float = 0.0
    tick: int = 0
    sessions: dict[str, SessionLedger] = field(default_factory=dict)
    records: list[OpRecord] = field(default_factory=list)

    def run(self, operations: Iterable[Operation], phase: Phase) -> list[OpRecord]:
        done: set[int] = set()
        left, mine = list(operations), []
        while left:
            level = [op for op in left if set(op.after) <= done]
            left = [op for op in left if op not in level]
            for op in level:
                mine.append(self._perform(op, phase, batched=sum(other.generates for other in level) > 1))
            done |= {op.id for op in level}
            self.now += 2.0
        self.records += mine
        return mine

    def _perform(self, op: Operation, phase: Phase, batched: bool) -> OpRecord:
        self.tick += 2
        record = OpRecord(
            op=op,
            phase=phase,
            rid=f"rid-{op.id}",
            started=self.now,
            first_token=self.now + 0.5,
            ended=self.now + 1.0,
            started_seq=self.tick,
            ended_seq=self.tick + 1,
        )
        history: list[int] = []
        if op.session is not None and op.kind != "score":
            ledger = self.sessions.setdefault(op.session, SessionLedger(op.session))
            history = ledger.history
        if op.generates:
            record.history = len(history)
            record.reply = self._reply(op, history, batched)
        else:
            record.reply = Reply(finish="stop", http_status=200, session_id=op.session)
        if op.session is not None and op.kind != "score":
            ledger.apply(record)
        return record

    def _reply(self, op: Operation, history: list[int], batched: bool) -> Reply:
        source = random.Random(f"{self.seed} {op.id}")
        ids = [*history, *op.input_ids]
        reply = Reply(http_status=200, finish="length", prompt_tokens=len(ids), cached_tokens=0, retractions=0)
        if op.kind == "turn" and history:
            reply.cached_tokens = len(history) - 1
        for place in range(op.max_new_tokens if op.kind != "score" else 0):
            reply.output_ids.append(_token(ids))
            ids.append(reply.output_ids[-1])
            if op.logprobs != "none":
                value = (
                    _logprob(ids)
                    + self.decode(source, batched, op, place)
                    + self.fault(source, batched, op, place)
                )
                reply.output_logprobs = [*(reply.output_logprobs or []), self._round(value)]
        reply.completion_tokens = len(reply.output_ids)
        if op.kind == "score":
            values = [
                _logprob(ids[: at + 1]) + self.prefill(source, batched, op, -1) for at in range(1, len(ids))
            ]
            best = [_logprob([*ids[:at], _token(ids[:at])]) for at in range(1, len(ids))]
            reply.input_logprobs = [None, *map(self._round, values)]
            reply.top_logprobs = [None, *(self._round(max(pair)) for pair in zip(best, values, strict=True))]
        return reply

    def _round(self, value: float) -> float:
        return min(0.0, value if self.digits is None else round(value, self.digits))


def _token(ids: list[int]) -> int:
    return 10 + random.Random(repr(ids[-6:])).randrange(VOCAB - 20)


def _logprob(ids: list[int]) -> float:
    """The log-prob of the last id given those before it: high for the greedy choice, low for any other."""
    greedy = ids[-1] == _token(ids[:-1])
    return -0.4 - 2.0 * random.Random(repr(ids[-7:])).random() - (0 if greedy else 6)


def whole_case(engine: Simulated, plan: Plan, cell: Cell | None = None, limit: int | None = None) -> CaseFacts:
    """Runs a case as the judge does: workload, controls, replays, and re-runs where there are suspects."""
    cell = cell or make_cell()
    engine.run(plan.operations, "workload")
    engine.run(control_plan(cell, VOCAB, seed=1).operations, "control")
    engine.run(replay_plan(engine.records, limit).operations, "replay")
    facts = facts_of(engine.records, cell, plan=plan)
    found = suspects(facts)
    if found:
        engine.run(confirm_plan(found).operations, "control")
        engine.run(replay_plan(engine.records, limit, start_id=2_500_000).operations, "replay")
        facts.records = list(engine.records)
    return facts


def changed(record: OpRecord, **fields: Any) -> OpRecord:
    """The record with other fields of its reply."""
    return msgspec.structs.replace(record, reply=msgspec.structs.replace(record.reply, **fields))


def op_record(kind: Any, number: int = 0, *, phase: Phase = "workload", at: float = 0.0, lasts: float = 1.0,
              reply: Reply | None = None, history: int = 0, shown: int | None = None,
              first: float | None = None, lag: float = 0.0, **fields: Any) -> OpRecord:  # fmt: skip
    """One record made by hand."""
    return OpRecord(
        op=Operation(id=number, kind=kind, **fields),
        phase=phase,
        rid=f"rid-{number}",
        history=history,
        started=at,
        ended=at + lasts,
        first_token=first,
        started_seq=round(at * 100),
        ended_seq=round((at + lasts) * 100),
        shown_at_action=shown,
        client_lag=lag,
        reply=reply or Reply(finish="stop"),
    )
