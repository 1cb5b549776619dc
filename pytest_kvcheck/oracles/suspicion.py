"""Which requests' log-probs the noise of this launch does not explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.noise import CEILING, OUTLIER_TIMES, UNKNOWN, Floor, Spread, allowance, inliers
from pytest_kvcheck.oracles.references import Emitted, Place, References, compare, deltas, emitted, gaps
from pytest_kvcheck.trace import OpRecord


@dataclass(frozen=True, slots=True)
class Suspect:
    """One request whose log-probs noise does not explain. ``places`` are against its first reference."""

    emitted: Emitted
    places: tuple[Place, ...]
    spread: Spread
    gap: float
    first_bad: int
    neighbours: tuple[OpRecord, ...] = ()

    @property
    def size(self) -> float:
        return max(self.spread.greatest, self.gap / 2)


# --- the floor -----------------------------------------------------------------------------------------
def measure(records: Sequence[OpRecord]) -> Floor:
    """The noise floor from the controls and, once they were run, from the plain re-runs of suspects."""
    references = References(records)
    alone: list[list[float]] = []
    batched: list[list[float]] = []
    rerun: list[list[float]] = []
    for one in emitted(record for record in records if record.phase == "control"):
        values = [delta for score in references.of(one.ids)[:1] for delta in deltas(compare(one, score))]
        if values:
            label = one.record.op.label
            group = rerun if label.startswith("confirm batched") else batched if "batched" in label else alone
            group.append(values)
    kept, typical = inliers([alone, batched, _hits(records), _repeats(records)])
    # Re-runs of suspects side by side may show noise that no control met, but they are no sample of what is
    # typical, and a fault that hits plain requests too would show there as well: they widen it by little.
    ceiling = max(2 * UNKNOWN, min(CEILING, allowance(typical, OUTLIER_TIMES)))
    kept += inliers([rerun], ceiling)[0]
    spread = Spread.of(delta for request in kept for delta in request)
    return Floor(spread, typical, len(alone) + len(batched) + len(rerun))


def _hits(records: Sequence[OpRecord]) -> list[list[float]]:
    """The same prompt twice, cold and from the cache: deltas up to the first token that differs."""
    first: dict[tuple[int, ...], OpRecord] = {}
    found = []
    for record in records:
        if not record.op.label.startswith(("control serial", "control hit")):
            continue
        cold = first.setdefault(record.op.input_ids, record)
        if cold is not record:
            found.append(_common(cold, record))
    return [values for values in found if values]


def _common(one: OpRecord, other: OpRecord) -> list[float]:
    values = []
    mine, theirs = one.reply.output_logprobs or [], other.reply.output_logprobs or []
    for a, b, x, y in zip(one.reply.output_ids, other.reply.output_ids, mine, theirs, strict=False):
        if a != b or x is None or y is None:
            break
        values.append(y - x)
    return values


def _repeats(records: Sequence[OpRecord]) -> list[list[float]]:
    """The same ids scored again: how repeatable the reference itself is."""
    first: dict[tuple[int, ...], OpRecord] = {}
    found = []
    for record in records:
        if record.op.label.startswith("control cold") and record.reply.input_logprobs:
            cold = first.setdefault(record.op.input_ids, record)
            if cold is not record:
                pairs = zip(cold.reply.input_logprobs or [], record.reply.input_logprobs, strict=False)
                found.append([b - a for a, b in pairs if a is not None and b is not None])
    return [values for values in found if values]


# --- suspicion -----------------------------------------------------------------------------------------
def suspects(facts: CaseFacts) -> list[Suspect]:
    """Requests of the workload and of the controls that noise does not explain, the worst first.

    Re-runs of suspects are no suspects themselves: they are what a suspect is compared with.
    """
    floor = measure(facts.records)
    references = References(facts.records)
    found = []
    for one in emitted(facts.records):
        if one.record.phase not in ("workload", "control") or one.record.op.label.startswith("confirm"):
            continue
        scores = references.of(one.ids)
        suspect = scores and suspect_of(one, scores[0], floor, facts)
        if suspect:
            found.append(suspect)
    return sorted(found, key=lambda suspect: -suspect.size)


def suspect_of(one: Emitted, score: OpRecord, floor: Floor, facts: CaseFacts) -> Suspect | None:
    """The request where noise does not explain how far it is from this scoring of its ids, else None."""
    places = compare(one, score)
    spread, gap = Spread.of(deltas(places)), max(gaps(places), default=0.0)
    # Either of the two candidates may have moved by the limit.
    if floor.explains(spread) and gap <= 2 * floor.limit:
        return None
    half = min(floor.limit, spread.greatest) / 2
    bad = [
        place.position
        for place in places
        if (place.observed is not None and abs(place.observed - place.reference) > half)
        or (place.top is not None and place.top - place.reference > 2 * floor.limit)
    ]
    me = one.record
    beside = [
        other
        for other in facts.records
        if other.op.generates
        and other is not me
        and other.phase == me.phase
        and other.started < me.ended
        and other.ended > me.started
    ]
    first = bad[0] if bad else places[0].position
    return Suspect(one, tuple(places), spread, gap, first, tuple(beside))


def shifted_by(suspect: Suspect, limit: float) -> int:
    """1 or -1 where the log-probs fit the tokens one place later or earlier and not their own; else 0."""
    reference = {place.position: place.reference for place in suspect.places}
    for shift in (1, -1):
        pairs = [
            abs(place.observed - reference[place.position + shift])
            for place in suspect.places
            if place.observed is not None and place.position + shift in reference
        ]
        if len(pairs) >= 3 and max(pairs) <= limit:
            return shift
    return 0
