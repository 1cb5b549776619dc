"""Known faults that can be planted, one broken line of accounting each.

The code asks ``faults.on("name")`` exactly at the line that is broken, so that each fault reads as the
deletion or alteration of that line. The table is what ``--list-faults`` prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``kind`` is the kind of fault (K01..K25) that an observer should name."""

    name: str
    kind: str
    what: str


TABLE: tuple[Fault, ...] = (
    Fault("retract-tail", "K05", "a retracted request's slots past its cached prefix are forgotten, not freed"),
    Fault(
        "stale-tail-on-next-turn", "K01", "a session's next turn forgets the slots past the inherited prefix"
    ),
    Fault("abort-queued-row", "K11", "aborting a queued request forgets the request row reserved for it"),
    Fault("abort-prefill-chunk", "K03", "aborting a request between two prefill chunks forgets its slots"),
    Fault("aborted-turn-kept-as-history", "K06", "an aborted turn becomes part of its session's history"),
    Fault("lock-never-released", "K10", "a finished request's lock on its cached prefix is never released"),
    Fault("double-free", "K12", "the last page of a finished request is freed twice"),
    Fault("close-in-flight-leak", "K09", "a session closed during a turn never frees its KV"),
    Fault("session-timeout-leak", "K09", "a session that timed out never frees its KV"),
    Fault("cached-tokens-off-by-one", "K19", "a turn reports one more cached token than it inherited"),
    Fault(
        "stale-kv-slot",
        "K13",
        "the first new token of a turn is written to the dummy slot, so its own is stale",
    ),
    Fault(
        "health-lies-when-stuck", "K23", "after an abort nothing is scheduled any more, yet /health says 200"
    ),
)


class Faults:
    """The faults that are planted in this engine. Raises ``ValueError`` for an unknown name."""

    def __init__(self, planted: Iterable[str] = ()) -> None:
        self._planted = frozenset(planted)
        for name in sorted(self._planted - {fault.name for fault in TABLE}):
            known = ", ".join(fault.name for fault in TABLE)
            raise ValueError(f"--plant: expected one of {known}; found {name!r}")

    def on(self, name: str) -> bool:
        return name in self._planted
