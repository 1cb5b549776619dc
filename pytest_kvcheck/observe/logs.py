"""Reading an engine's log: rules that name lines, and the events that they give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

# "leak": the engine's own check found a fault. "fatal": the engine is going down. "account": one pool's sums
# of one iteration (fields total, available, evictable, protected, session_held, uncached). The rest explains;
# rules of meaning "session" are named session-opened, -closed, -released, -deferred, -timeout in every adapter.
Meaning = Literal["leak", "fatal", "account", "retract", "session", "warning", "lifecycle"]


@dataclass(frozen=True, slots=True)
class LogRule:
    """A line worth keeping. Named groups of ``pattern`` become the event's fields (numbers as int)."""

    name: str
    pattern: re.Pattern[str]
    meaning: Meaning
    kind: str = ""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One matched line. ``t`` is when we read it, on the trace's clock; ``line`` counts from 1."""

    t: float
    line: int
    rule: str
    meaning: Meaning
    kind: str
    text: str
    fields: dict[str, int | float | str] = field(default_factory=dict)


def match_line(rules: Iterable[LogRule], text: str, line: int, t: float) -> list[LogEvent]:
    """Every event that one line gives: a busy check of two pools gives two accounts."""
    events = []
    for rule in rules:
        for hit in rule.pattern.finditer(text):
            fields = {name: _number(value) for name, value in hit.groupdict().items() if value is not None}
            events.append(LogEvent(t, line, rule.name, rule.meaning, rule.kind, text[:2000], fields))
    return events


def _number(value: str) -> int | float | str:
    try:
        return int(value)
    except ValueError:
        return value


def of_meaning(events: Sequence[LogEvent], *meanings: Meaning) -> list[LogEvent]:
    """The events with one of these meanings, in log order."""
    return [event for event in events if event.meaning in meanings]
