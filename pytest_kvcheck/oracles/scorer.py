"""Log-probs against another implementation on the same weights (``--kvcheck-scorer``).

An engine that is wrong in the same way every time (position, window, rotary angle) agrees with its own one-shot
scoring of the same tokens, however often it is asked; it does not agree with another implementation. What does
not even agree with the engine's own scoring is the finding of ``logprobs``, and is not told twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcheck.findings import Finding
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import name_of
from pytest_kvcheck.oracles.noise import CEILING, Floor, Spread, allowance, inliers
from pytest_kvcheck.oracles.references import References, compare, deltas, emitted
from pytest_kvcheck.oracles.suspicion import Suspect, measure, shifted_by, suspect_of, suspects
from pytest_kvcheck.trace import OpRecord

NAME = "scorer"


def judge_scorer(facts: CaseFacts) -> list[Finding]:
    """Requests that the engine scores alike and another implementation does not (K17; K18 where shifted)."""
    if not facts.scored or measure(facts.records).typical > CEILING:
        return []
    references, floor = References(facts.scored), widened(facts)
    told = {suspect.emitted.record.op.id for suspect in suspects(facts)}
    found, good = [], 0
    for one in emitted(facts.records):
        op = one.record.op
        if one.record.phase not in ("workload", "control") or op.label.startswith("confirm"):
            continue
        scores = references.of(one.ids)
        if not scores or op.id in told:
            continue
        suspect = suspect_of(one, scores[0], floor, facts)
        if suspect:
            found.append(suspect)
        else:
            good += 1
    return [_wrong(found, good, floor, facts)] if found else []


def widened(facts: CaseFacts) -> Floor:
    """The noise floor between the engine and another implementation.

    Three things widen the launch's own: what rounding to the engine's data type does in the other
    implementation (the engine has no part in that), and by how much the launch's plain requests differ from it,
    as far as the first two explain that. So an engine that is wrong in its plain requests too gains nothing.
    """
    own = measure(facts.records)
    fine, coarse = References(facts.scored), facts.rounded
    rounding = [
        a - b
        for record in coarse
        for exact in fine.of(record.op.input_ids)[:1]
        for a, b in zip(record.reply.input_logprobs or [], exact.reply.input_logprobs or [], strict=False)
        if a is not None and b is not None
    ]
    bound = max(own.limit, allowance(min(max(map(abs, rounding), default=0.0), CEILING)) if rounding else 0.0)
    alone: list[Sequence[float]] = []
    batched: list[Sequence[float]] = []
    for one in emitted(facts.of_phase("control")):
        label = one.record.op.label
        values = [delta for score in fine.of(one.ids)[:1] for delta in deltas(compare(one, score))]
        if values and not label.startswith("confirm") and max(map(abs, values)) <= bound:
            (batched if "batched" in label else alone).append(values)
    plain = [delta for values in inliers([alone, batched])[0] for delta in values]
    return Floor(_widest(own.spread, Spread.of(rounding), Spread.of(plain)), own.typical, own.requests)


def _widest(*spreads: Spread) -> Spread:
    return Spread(
        count=sum(spread.count for spread in spreads),
        greatest=max(spread.greatest for spread in spreads),
        second=max(spread.second for spread in spreads),
        p99=max(spread.p99 for spread in spreads),
        mean=max(spread.mean for spread in spreads),
        kl=max(spread.kl for spread in spreads),
    )


def opinion(suspect: Suspect, facts: CaseFacts) -> list[str]:
    """Whose side the other implementation takes where a request and the engine's own scoring differ."""
    scores = References(facts.scored).of(suspect.emitted.ids)
    own = References(facts.records).of(suspect.emitted.ids)
    if not scores or not own:
        return []
    request = Spread.of(deltas(compare(suspect.emitted, scores[0])))
    return [
        f"{_who(scores[0])} differs from the request by up to {request.greatest:.2g}, and from the engine's "
        f"one-shot scoring by up to {_apart(suspect, own[0], scores[0]):.2g}."
    ]


def _wrong(found: list[Suspect], good: int, floor: Floor, facts: CaseFacts) -> Finding:
    worst = min(found, key=lambda suspect: suspect.emitted.record.started_seq)
    one, reply = worst.emitted, worst.emitted.record.reply
    shift = shifted_by(worst, floor.limit)
    kind = "K18" if shift else "K17"
    score = References(facts.scored).of(one.ids)[0]
    own = References(facts.records).of(one.ids)
    offset = worst.first_bad - len(one.prompt)
    evidence = [
        f"Expected: at most {floor.limit:.2g}; this launch's controls and rounding: {floor.spread}.",
        f"First bad: position {worst.first_bad}, "
        + (f"output token {offset}" if offset >= 0 else f"input token {worst.first_bad - one.history}")
        + f" (history {one.history}, prompt {len(one.prompt)}); cached {reply.cached_tokens}, retracted "
        f"{reply.retractions or 0} times.",
        f"The engine's own one-shot scoring of the same ids is off by {_apart(worst, own[0], score):.2g} as "
        f"well, and {Spread.of(deltas(compare(one, own[0]))).greatest:.2g} from the request."
        if own
        else "The engine itself was not asked to score these ids.",
        f"{len(found)} requests differ, the earliest at position {min(each.first_bad for each in found)}; "
        f"{good} agree.",
    ]
    if shift:
        evidence.append(f"The values fit the tokens {abs(shift)} place {'later' if shift > 0 else 'earlier'}.")
    plain = [suspect for suspect in found if suspect.emitted.record.phase == "control"]
    if plain:
        evidence.append(f"{len(plain)} of them are plain requests on a fresh server.")
    return Finding(
        kind=kind,
        oracle=NAME,
        status="mismatch",
        headline=(
            f"{name_of(one.record)}: log-probs off by up to {worst.spread.greatest:.3g} (mean "
            f"{worst.spread.mean:.2g}) against {_who(score)} on the same weights; the engine agrees with itself"
        ),
        owner=name_of(one.record),
        evidence=tuple(evidence),
        next_step=(
            "look at what is the same in a turn and in its one-shot scoring: positions, window, rotary angles, "
            "masks, weights as loaded; where kernels are approximate on purpose, judge without --kvcheck-scorer"
        ),
        also=tuple(other for other in ("K17", "K18", "K13") if other != kind),
    )


def _apart(suspect: Suspect, own: OpRecord, other: OpRecord) -> float:
    """The greatest distance between the engine's own scoring and the other one, at the request's places."""
    theirs = {place.position: place.reference for place in compare(suspect.emitted, other)}
    return max(
        (
            abs(place.reference - theirs[place.position])
            for place in compare(suspect.emitted, own)
            if place.position in theirs
        ),
        default=0.0,
    )


def _who(score: OpRecord) -> str:
    return score.op.label
