"""The ledger: what the trace says that each session's visible history is, so what the server should hold.

Only a turn that finished (``length`` or ``stop``) advances a session; an abort, a rejection or a disconnect
leaves it at its last finished turn. That rule is the product's, not an engine's: it is what a client can see.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_kvcheck.trace import FINISHED, OpRecord


@dataclass(slots=True)
class TurnSpan:
    """Where one finished turn stands in its session's history: ``[start, start+new)`` input, then output."""

    record: OpRecord
    start: int
    new: int
    out: int


@dataclass(slots=True)
class SessionLedger:
    """One session by the client's account. ``history`` holds the token ids that are visible to the client."""

    name: str
    history: list[int] = field(default_factory=list)
    turns: list[TurnSpan] = field(default_factory=list)
    # The last turn that was sent, however it ended; None before the first.
    last: OpRecord | None = None
    open: bool = True

    def apply(self, record: OpRecord) -> None:
        """Account for one ended operation of this session."""
        # A close that was never sent, because the server was stuck, or that failed, closed nothing.
        if record.op.kind == "close" and record.reply.finish == "stop":
            self.open = False
        if record.op.kind != "turn":
            return
        self.last = record
        if record.reply.finish in FINISHED:
            ids, out = list(record.op.input_ids), list(record.reply.output_ids)
            self.turns.append(TurnSpan(record, len(self.history), len(ids), len(out)))
            self.history += ids + out


def sessions(records: Iterable[OpRecord]) -> dict[str, SessionLedger]:
    """The ledgers of every session in the records, which must stand in the order in which they ended."""
    ledgers: dict[str, SessionLedger] = {}
    for record in records:
        if record.op.session is not None:
            ledgers.setdefault(record.op.session, SessionLedger(record.op.session)).apply(record)
    return ledgers
