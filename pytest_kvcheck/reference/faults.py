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
    Fault("refusal-frees-session", "K07", "a turn that is refused clears the mark of the one that still runs"),
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
    Fault("bonus-slot-race", "K02", "V2 does not claim the bonus token before the round, so lengths run short"),
    Fault("bonus-claimed-twice", "K02", "V2 claims the bonus token before the round and when it is resolved"),
    Fault("overshoot-untrimmed", "K02", "a turn keeps what its last round accepted past the turn's end"),
    Fault("stop-overshoot-kept", "K02", "a turn keeps what was accepted behind the stop id that ended it"),
    Fault("spec-reject-slots-kept", "K01", "V1 forgets the slots of rejected draft tokens, not freeing them"),
    Fault("late-result-after-retract", "K05", "a result is applied to a request that was retracted meanwhile"),
    Fault("partial-page-freed", "K15", "a trim rounds down and frees the page that still holds live tokens"),
    Fault("lent-slot-double-count", "K16", "the checker counts a lent session's KV twice: a false alarm"),
    Fault("swa-cursor-uncapped", "K14", "a session that was rolled back keeps its sliding-window cursor"),
    Fault("window-short", "K17", "sliding layers see one token less than their window, in every computation"),
    Fault("rope-clamped", "K17", "positions past 256 get the angle of 256, in every computation"),
    Fault("swa-page-ge-window", "K14", "where a page holds a whole window, pages that it left are never freed"),
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
