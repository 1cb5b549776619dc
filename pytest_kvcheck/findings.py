"""A finding: one violated invariant, with its amount, owner, evidence and next step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal["leak", "mismatch", "crash", "stuck", "residue", "unexercised", "inconclusive"]
Outcome = Literal[
    "passed",
    "leak",
    "mismatch",
    "stuck",
    "crash",
    "residue",
    "unexercised",
    "inconclusive",
    "skipped",
    "error",
]

# Gravest first. A strict check that kills the engine leaves a leak *and* a crash: the leak is the news.
# "inconclusive" stands before "unexercised": a starved client explains why nothing was exercised.
SEVERITY: tuple[Status, ...] = (
    "leak",
    "mismatch",
    "crash",
    "stuck",
    "residue",
    "inconclusive",
    "unexercised",
)


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One violated invariant.

    ``kind`` is a fault kind ``K01``..``K25`` (``docs/kinds.md``); where an observation fits several,
    the likeliest stands in ``kind`` and the others in ``also``. ``tokens`` and ``pages`` are the amount
    (None: not known); ``owner`` names the request, session or operation that lost them, or None with the
    reason in ``evidence``; ``operations`` are the ids of the plan's operations that it points to, the likeliest
    first. ``headline`` is one sentence with expected and found in the same unit.
    """

    kind: str
    oracle: str
    status: Status
    headline: str
    tokens: int | None = None
    pages: int | None = None
    pool: str | None = None
    owner: str | None = None
    operations: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    next_step: str = ""
    also: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, str, str, str | None]:
        """What stays equal when the same fault is seen again at another size or by another request."""
        return (self.kind, self.oracle, self.status, self.pool)

    def paragraph(self) -> str:
        """The finding as one paragraph for a person."""
        parts = [f"{self.status.upper()} {self.kind} [{self.oracle}] {self.headline}"]
        if self.owner:
            parts.append(f"Owner: {self.owner}.")
        parts.extend(self.evidence)
        if self.next_step:
            parts.append(f"Next: {self.next_step}")
        return "\n  ".join(parts)


def gravest(findings: Iterable[Finding]) -> Outcome:
    """The outcome of a case from its findings: ``passed`` when there are none."""
    found = {finding.status for finding in findings}
    for status in SEVERITY:
        if status in found:
            return status
    return "passed"


def some(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count} {noun}" + ("" if abs(count) == 1 else "s")
