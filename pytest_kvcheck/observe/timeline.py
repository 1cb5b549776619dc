"""Joins samples, log accounts and operations into one series, and finds where an account first broke.

Pure functions; all times are of one clock, the trace's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_kvcheck.observe.logs import LogEvent
from pytest_kvcheck.trace import GaugeSample, OpRecord

PARTS = ("available", "evictable", "protected", "session_held", "uncached")
# A log line is dated when it is read, which is a little after it was written.
READ_DELAY = 0.5


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened. ``item`` is a sample, a log event, or the record that starts or ends here."""

    t: float
    what: Literal["sample", "log", "start", "end"]
    item: GaugeSample | LogEvent | OpRecord


@dataclass(frozen=True, slots=True)
class Break:
    """The first iteration whose account does not add up.

    ``lost``: tokens in no part of the account (negative: counted twice). ``before``: the same pool's account
    one iteration earlier, None at the first. ``moved``: how each part changed since. ``in_flight``: the
    operations that the server may have been working on between the two.
    """

    event: LogEvent
    before: LogEvent | None
    pool: str
    lost: int
    moved: dict[str, int]
    in_flight: tuple[OpRecord, ...]


def pool_of(event: LogEvent) -> str:
    """The pool that an account line is about; ``full`` where it names none."""
    return str(event.fields.get("pool", "full"))


def unaccounted(event: LogEvent) -> int | None:
    """``total`` less the sum of the parts of an account, in tokens; None where the line is no account.

    A part that this engine's line does not have counts as 0: older releases have fewer.
    """
    total, available = event.fields.get("total"), event.fields.get("available")
    if event.meaning != "account" or not isinstance(total, int) or not isinstance(available, int):
        return None
    parts = [event.fields.get(name, 0) for name in PARTS]
    return total - sum(part for part in parts if isinstance(part, int))


def first_break(events: Iterable[LogEvent]) -> LogEvent | None:
    """The first account, of any pool, that does not add up; None where all do."""
    return next((event for event in events if unaccounted(event)), None)


def explain_break(events: Sequence[LogEvent], records: Iterable[OpRecord]) -> Break | None:
    """The first break with the iteration before it and the operations in flight between the two."""
    event = first_break(events)
    if event is None:
        return None
    earlier = [
        other
        for other in events
        if other.line < event.line and pool_of(other) == pool_of(event) and unaccounted(other) is not None
    ]
    before = earlier[-1] if earlier else None
    moved = {
        name: _number(event, name) - _number(before, name)
        for name in ("total", *PARTS)
        if before is not None and _number(event, name) != _number(before, name)
    }
    since = before.t if before is not None else event.t
    lost = unaccounted(event)
    assert lost is not None
    return Break(event, before, pool_of(event), lost, moved, tuple(in_flight(records, since, event.t)))


def in_flight(records: Iterable[OpRecord], since: float, until: float) -> list[OpRecord]:
    """Operations that had started by ``until`` and had not ended ``READ_DELAY`` before ``since``.

    Waits and barriers are the client's own and do not count.
    """
    return [
        record
        for record in records
        if record.op.kind not in ("wait", "barrier")
        and record.started <= until
        and record.ended >= since - READ_DELAY
    ]


def series(
    samples: Iterable[GaugeSample], events: Iterable[LogEvent], records: Iterable[OpRecord]
) -> list[Entry]:
    """Everything in order of time; at equal times a start stands before what it may have caused."""
    entries = [Entry(sample.t, "sample", sample) for sample in samples]
    entries += [Entry(event.t, "log", event) for event in events]
    for record in records:
        entries.append(Entry(record.started, "start", record))
        entries.append(Entry(record.ended, "end", record))
    order = {"start": 0, "log": 1, "sample": 2, "end": 3}
    return sorted(entries, key=lambda entry: (entry.t, order[entry.what]))


def _number(event: LogEvent, name: str) -> int:
    value = event.fields.get(name, 0)
    return value if isinstance(value, int) else 0
