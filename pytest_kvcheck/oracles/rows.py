"""Request rows: as many requests as the cell has rows must be able to run side by side (the row probe)."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_kvcheck.findings import Finding
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import starved
from pytest_kvcheck.oracles.owner import attribute
from pytest_kvcheck.trace import FINISHED, OpRecord

NAME = "rows"
# A request that waited for a row takes at least this share of the time that the first ones took.
WAVE = 0.15


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe. ``peak``: the greatest number that ran side by side; ``turned_away``: requests that were sent
    and got their first token only after another one had ended. ``prompt``: the rest all had theirs in the first
    half of the time until then, so admission itself was not what took so long. ``second_wave``: those that were
    turned away ran after the others; a starved front end that hands out whole answers at once shows none of it.
    """

    sent: int
    peak: int
    turned_away: int
    prompt: bool
    second_wave: bool


def read_probe(records: list[OpRecord]) -> Probe | None:
    """What a probe says, or None where a request of it did not finish."""
    if not records or any(r.reply.finish not in FINISHED or r.first_token is None for r in records):
        return None
    first_end = min(record.ended for record in records)
    starts = [(record.first_token or 0.0, record.ended) for record in records]
    peak = max(sum(begin <= at < end for begin, end in starts) for at, _ in starts)
    late = [
        (begin, end)
        for record, (begin, end) in zip(records, starts, strict=True)
        if begin >= first_end and record.started < first_end
    ]
    sent = min(record.started for record in records)
    admitted = max((begin for begin, _ in starts if begin < first_end), default=first_end)
    # Alone in its batch a request may run faster than among many, but not without taking time.
    least = WAVE * (first_end - admitted)
    wave = all(end - begin >= least and end - first_end >= least for begin, end in late)
    return Probe(len(records), peak, len(late), admitted - sent <= (first_end - sent) / 2, wave and least > 0)


def judge_rows(facts: CaseFacts) -> list[Finding]:
    """K11 where three probes run short by the same number of rows.

    The second gives a slow server three times the time to admit everyone, the third has each request come when
    the one before it runs; only missing rows hold equally many back in all of them. A probe of the fresh launch
    ("rows before") is the measure where there is one, because an engine may keep rows for itself.
    """
    if starved(facts) or not facts.server.alive:
        return []
    probes: dict[str, list[OpRecord]] = {}
    for record in facts.of_phase("probe"):
        when, _, rest = record.op.label.removeprefix("rows ").partition(" ")
        if record.op.generates and record.op.label.startswith("rows "):
            probes.setdefault(f"{when} {rest.split()[0]}", []).append(record)
    read = {name: probe for name, records in probes.items() if (probe := read_probe(records)) is not None}
    after = [probe for name, probe in read.items() if name.startswith("after")]
    if len(after) < 3:
        return []
    before = [probe.peak for name, probe in read.items() if name.startswith("before")]
    rows = max(before) if before else min(probe.sent for probe in after)
    missing = {rows - probe.peak for probe in after}
    # On a fast server the shortest probe is over almost as soon as everyone was let in: the longer ones tell.
    # Of those that come one by one, only the first that had to wait was sent before another had ended.
    clean = (
        all(probe.turned_away == probe.sent - probe.peak for probe in after[:2])
        and after[-1].turned_away > 0
        and all(probe.prompt and probe.second_wave for probe in after[1:])
    )
    if len(missing) != 1 or not clean or (lost := missing.pop()) <= 0:
        return []
    why = attribute(facts, "rows", None, lost)
    peaks = ", ".join(str(probe.peak) for probe in after)
    return [
        Finding(
            kind="K11",
            oracle=NAME,
            status="leak",
            headline=f"{lost} of {rows} request rows are gone: {rows - lost} plain requests ran side by side",
            owner=why.owner,
            operations=why.operations,
            evidence=(
                f"Probes of {after[0].sent} requests reached {peaks}; the others waited until one had ended.",
                *why.evidence,
            ),
            next_step="look at what returns the row of a request that was aborted or retracted while it waited",
            also=tuple(kind for kind in why.kinds if kind != "K11"),
        )
    ]
