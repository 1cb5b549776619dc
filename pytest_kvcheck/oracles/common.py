"""What several oracles need: how a request is called in a report, who was in flight, who was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.trace import OpRecord

# For observations that no fault kind of docs/kinds.md describes (a crash, a case that proved nothing).
NO_KIND = "K00"
# The client read its sockets so late that what it calls a wait may have been its own.
LAG_LIMIT = 1.0


def name_of(record: OpRecord) -> str:
    """``session s3, round 2 turn 1``: the same words in every finding."""
    op = record.op
    what = op.label or f"{op.kind} {op.id}"
    return f"session {op.session}, {what}" if op.session and op.session not in what else what


def names(records: Sequence[OpRecord], most: int = 5) -> str:
    listed = "; ".join(name_of(record) for record in records[:most])
    return listed + (f" and {len(records) - most} more" if len(records) > most else "")


def ids_of(records: Iterable[OpRecord], most: int = 6) -> tuple[int, ...]:
    """Ids of the operations that a finding points to, the first of many."""
    return tuple(islice(dict.fromkeys(record.op.id for record in records), most))


def requests(records: Iterable[OpRecord]) -> list[OpRecord]:
    """Those that ask for tokens: turns, plain requests, scorings."""
    return [record for record in records if record.op.generates]


def overlapping(record: OpRecord, others: Iterable[OpRecord]) -> list[OpRecord]:
    return [
        other
        for other in others
        if other is not record and other.started < record.ended and other.ended > record.started
    ]


def starved(facts: CaseFacts) -> bool:
    """Whether the client itself was too slow to say that the server was."""
    return facts.client_lag > LAG_LIMIT


def turns_of(facts: CaseFacts) -> dict[str, list[OpRecord]]:
    """Each session's turns of the workload in the order in which they were sent."""
    found: dict[str, list[OpRecord]] = {}
    for record in facts.of_phase("workload"):
        if record.op.kind == "turn" and record.op.session is not None:
            found.setdefault(record.op.session, []).append(record)
    for turns in found.values():
        turns.sort(key=lambda record: (record.started_seq, record.started))
    return found


def asked_to_stop(facts: CaseFacts) -> set[int]:
    """Ids of requests that an abort, a disconnect, a close or a timeout of their session may have ended."""
    running = requests(facts.of_phase("workload", "drain"))
    found: set[int] = set()
    for record in facts.of_phase("workload", "drain"):
        op = record.op
        if op.kind in ("abort", "disconnect"):
            everything = op.target is None
            found |= {r.op.id for r in running if everything and _meets(record, r)}
            if op.target is not None:
                found.add(op.target)
        elif op.kind == "close":
            found |= {r.op.id for r in running if r.op.session == op.session and _meets(record, r)}
        elif op.kind == "open" and op.timeout is not None:
            found |= {r.op.id for r in running if r.op.session == op.session}
    return found


def _meets(action: OpRecord, request: OpRecord) -> bool:
    return request.started <= action.ended and action.started <= request.ended


def closed_in_flight(facts: CaseFacts) -> list[OpRecord]:
    """Turns whose session was closed while they ran."""
    closes = [r for r in facts.of_phase("workload", "drain") if r.op.kind == "close"]
    return [
        turn
        for turns in turns_of(facts).values()
        for turn in turns
        if any(
            close.op.session == turn.op.session and turn.started < close.started < turn.ended
            for close in closes
        )
    ]


def timed_out_sessions(facts: CaseFacts) -> list[OpRecord]:
    """Opens whose session the server closed after its timeout: it logged so, or it lay idle so long."""
    logged = {
        str(event.fields.get("session", ""))
        for event in facts.log
        if event.meaning == "session" and "timed out" in event.text
    }
    turns = turns_of(facts)
    closes = {r.op.session: r.started for r in facts.of_phase("workload", "drain") if r.op.kind == "close"}
    waits = [r for r in facts.of_phase("workload", "drain") if r.op.kind == "wait"]
    found = []
    for record in facts.of_phase("workload"):
        op = record.op
        if op.kind != "open" or op.timeout is None or op.session is None:
            continue
        last = max((turn.ended for turn in turns.get(op.session, [])), default=record.ended)
        until = closes.get(op.session, max((wait.ended for wait in waits), default=last))
        if record.reply.session_id in logged or op.session in logged or until - last > op.timeout + 2:
            found.append(record)
    return found
