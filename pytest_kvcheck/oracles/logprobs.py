"""Log-probs: what a request said against a one-shot scoring of exactly the tokens that the client saw.

Teacher forcing: only the log-prob of the emitted token is compared, so one flip cannot cascade. The order of
work is measure (``noise.py``, from this launch's plain requests), suspect, re-run, judge: nothing is called
corrupt that was not far outside the floor against several scorings that agree with each other.
"""

from __future__ import annotations

import math

from pytest_kvcheck.findings import Finding, Status
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import ids_of, name_of
from pytest_kvcheck.oracles.noise import CEILING, EXACT, Floor, Spread
from pytest_kvcheck.oracles.references import References, compare, deltas, emitted, gaps
from pytest_kvcheck.oracles.scorer import opinion
from pytest_kvcheck.oracles.suspicion import Suspect, measure, shifted_by, suspects
from pytest_kvcheck.trace import FINISHED, OpRecord

__all__ = ["judge_logprobs", "measure", "self_test", "suspects"]

NAME = "logprobs"
# log_softmax may round a certainty to a hair above zero.
POSITIVE_SLACK = 1e-5
# Past these, a deviation is called a mismatch even where it could not be re-run.
GROSS_MEAN, GROSS_KL = 0.5, 0.1


# --- the verdict ---------------------------------------------------------------------------------------
def judge_logprobs(facts: CaseFacts) -> list[Finding]:
    """Structural faults at once (K18); then floor, suspects and, where they were re-run, the verdict."""
    found = _structure(facts)
    floor = measure(facts.records)
    if floor.typical > CEILING:
        return [*found, _noisy_launch(floor)]
    corrupt: dict[str, list[Suspect]] = {}
    doubtful: list[Suspect] = []
    references = References(facts.records)
    rerun = any(record.op.label.startswith("confirm") for record in facts.of_phase("control"))
    for suspect in suspects(facts):
        if _stands(suspect, references, floor, rerun):
            corrupt.setdefault(_kind(suspect, floor), []).append(suspect)
        else:
            doubtful.append(suspect)
    found += [_corrupt(kind, group, floor, facts) for kind, group in corrupt.items()]
    if doubtful and not corrupt:
        found.append(_doubtful(doubtful, floor, references))
    return found or _not_compared(facts, references)


def _stands(suspect: Suspect, references: References, floor: Floor, rerun: bool) -> bool:
    """Whether the deviation shows against every scoring of the same ids, and these agree with each other.

    Where nothing at all could be run again (the server died), only what no numerics explain stands.
    """
    scores = references.of(suspect.emitted.ids)
    if len(scores) < 2:
        gross = suspect.spread.count >= 4 and suspect.spread.mean > GROSS_MEAN
        return not rerun and (gross or suspect.spread.kl > GROSS_KL)
    for score in scores:
        places = compare(suspect.emitted, score)
        spread, gap = Spread.of(deltas(places)), max(gaps(places), default=0.0)
        if floor.explains(spread) and gap <= 2 * floor.limit:
            return False
    return _wobble(suspect, references) <= max(floor.limit / 2, suspect.size / 4)


def _wobble(suspect: Suspect, references: References) -> float:
    """The greatest distance between two scorings of one place."""
    by_position: dict[int, list[float]] = {}
    for score in references.of(suspect.emitted.ids):
        for place in compare(suspect.emitted, score):
            by_position.setdefault(place.position, []).append(place.reference)
    return max((max(values) - min(values) for values in by_position.values()), default=0.0)


def _kind(suspect: Suspect, floor: Floor) -> str:
    """K18 misaligned · K17 a plain request, wrong from its first token on a cache hit · K13 otherwise."""
    if shifted_by(suspect, floor.limit):
        return "K18"
    one = suspect.emitted
    if one.history == 0 and one.record.reply.cached_tokens and suspect.first_bad <= len(one.prompt):
        return "K17"
    return "K13"


def _also(suspect: Suspect, kind: str, facts: CaseFacts) -> tuple[str, ...]:
    record, also = suspect.emitted.record, ["K13", "K17"]
    if record.reply.retractions:
        also.append("K05")
    if facts.cell.features.speculative and suspect.emitted.history:
        also.append("K02")
    return tuple(other for other in also if other != kind)


def _corrupt(kind: str, group: list[Suspect], floor: Floor, facts: CaseFacts) -> Finding:
    # A wrong slot stays in its session: of all that read it, the first says most.
    worst = min(group, key=lambda suspect: suspect.emitted.record.started_seq)
    one, reply = worst.emitted, worst.emitted.record.reply
    features = facts.cell.features
    shift = shifted_by(worst, floor.limit)
    whose = _owner(worst)
    if worst.spread.greatest >= worst.gap / 2:
        amount = f"off by up to {worst.spread.greatest:.3g} (mean {worst.spread.mean:.2g})"
    else:
        amount = f"of tokens that stand up to {worst.gap:.3g} below the best"
    offset = worst.first_bad - len(one.prompt)
    where = f"output token {offset}" if offset >= 0 else f"input token {worst.first_bad - one.history}"
    evidence = [
        f"Expected: at most {floor.limit:.2g}, from this launch's controls ({floor}).",
        f"First bad: {where}, position {worst.first_bad} (history {one.history}, prompt {len(one.prompt)}; "
        f"offset {worst.first_bad % features.page_size} in its page of {features.page_size}"
        + (f", {worst.first_bad % features.chunked_prefill} in its chunk" if features.chunked_prefill else "")
        + f"); cached {reply.cached_tokens}, retracted {reply.retractions or 0} times, "
        f"{len(worst.neighbours)} other requests at the same time.",
    ]
    if shift:
        evidence.append(f"The values fit the tokens {abs(shift)} place {'later' if shift > 0 else 'earlier'}.")
    scores = References(facts.records).of(one.ids)
    if len(scores) > 1:
        evidence.append(
            f"{len(scores)} one-shot scorings of the same {len(one.ids)} ids agree with each other."
        )
    else:
        evidence.append("It could not be scored again; it is far beyond anything that numerics explain.")
    evidence += _plain_twin(worst, facts) + opinion(worst, facts)
    if len(group) > 1:
        evidence.append(f"{len(group)} requests are affected: {_names(group)}.")
    return Finding(
        kind=kind,
        oracle=NAME,
        status="mismatch",
        headline=f"{whose}: log-probs {amount} against a one-shot scoring of the same tokens",
        owner=whose,
        operations=ids_of(suspect.emitted.record for suspect in group),
        evidence=tuple(evidence),
        next_step=(
            "the KV that this request read is not that of its visible tokens: look at what wrote or freed the "
            f"slots before position {worst.first_bad}"
            if not shift
            else "look at how log-probs are joined to tokens across the turn's first position"
        ),
        also=_also(worst, kind, facts),
    )


def _plain_twin(suspect: Suspect, facts: CaseFacts) -> list[str]:
    """What a plain request with the same visible prompt said when it was sent afterwards."""
    references = References(facts.records)
    twins = [
        Spread.of(deltas(compare(one, score)))
        for one in emitted(record for record in facts.records if record.phase == "control")
        if one.record.op.label.startswith("confirm") and one.prompt == suspect.emitted.prompt
        for score in references.of(one.ids)[:1]
    ]
    if not twins:
        return []
    greatest = max(twin.greatest for twin in twins)
    return [f"Plain requests with the same prompt, run again: off by at most {greatest:.2g}."]


def _doubtful(group: list[Suspect], floor: Floor, references: References) -> Finding:
    worst = group[0]
    again = len(references.of(worst.emitted.ids)) > 1
    wobble = _wobble(worst, references)
    reason = (
        f"scorings of the same ids differ from each other by up to {wobble:.2g}: the reference is not stable"
        if again
        else "it was not scored again, so nothing says whether it would show twice"
    )
    return Finding(
        kind="K24",
        oracle=NAME,
        status="inconclusive",
        headline=f"{_owner(worst)}: log-probs differ by up to {worst.size:.3g}, but {reason}",
        owner=_owner(worst),
        operations=ids_of(suspect.emitted.record for suspect in group),
        evidence=(f"Controls of this launch: {floor}.", f"{len(group)} requests: {_names(group)}."),
        next_step="run the case again alone; switch on the engine's deterministic mode where it has one",
        also=("K13", "K17"),
    )


def self_test(facts: CaseFacts) -> list[Finding]:
    """The comparison must see one replaced token in a reference (``replay.self_test_plan``), or it is blind."""
    by_id = {one.record.op.id: one for one in emitted(facts.records)}
    floor = measure(facts.records)
    seen = []
    for score in facts.of_phase("replay"):
        one = by_id.get(score.op.target) if score.op.target is not None else None
        if one is not None and score.op.label.startswith("self-test") and score.reply.input_logprobs:
            places = [place for place in compare(one, score) if place.position >= len(one.prompt)]
            seen.append(Spread.of(deltas(places)).greatest)
    if not seen or max(seen) > floor.limit:
        return []
    return [
        Finding(
            kind="K24",
            oracle=NAME,
            status="inconclusive",
            headline=(
                f"the log-prob comparison is blind here: another token in the prompt moves log-probs by "
                f"{max(seen):.2g} at most, and {floor.limit:.2g} is within this launch's noise"
            ),
            evidence=(f"Controls of this launch: {floor}.",),
            next_step="give a model with weights that attend to their context (kvcheck models make)",
        )
    ]


def _noisy_launch(floor: Floor) -> Finding:
    """Half of this launch's plain requests differ from their own scoring by more than any noise seen so far."""
    # Where the other controls prove fine arithmetic, no rounding gives this; nor does any above 1 nat.
    gross = EXACT < floor.spread.greatest < 1e-3 or floor.typical > 1.0
    status: Status = "mismatch" if gross else "inconclusive"
    return Finding(
        kind="K13" if gross else "K24",
        oracle=NAME,
        status=status,
        headline=(
            f"half of this launch's own plain requests differ by {floor.typical:.2g} and more from a one-shot "
            f"scoring of the same tokens; expected at most {CEILING}"
        ),
        evidence=(
            f"The other controls: {floor}.",
            "Such controls are no noise floor: sessions were not judged.",
        ),
        next_step="check the attention backend with one plain request; use the engine's deterministic mode",
        also=("K17", "K18"),
    )


def _not_compared(facts: CaseFacts, references: References) -> list[Finding]:
    asked = [r for r in facts.of_phase("workload") if r.op.logprobs != "none" and r.reply.output_ids]
    known = facts.promises.lacks.keys() & {"logprobs", "replay"}
    if not asked or references.count or known or not facts.server.alive or not facts.idle_reached:
        return []
    return [
        Finding(
            kind="K24",
            oracle=NAME,
            status="inconclusive",
            headline=f"{len(asked)} requests returned log-probs and none was compared: no replay was scored",
            evidence=tuple(
                f"Replay {r.op.label or r.op.id}: {r.reply.finish} {r.reply.message[:200]}"
                for r in list(facts.of_phase("replay"))[:3]
            ),
            next_step="look at the replay requests in the trace: the server must answer scoring requests",
        )
    ]


def _structure(facts: CaseFacts) -> list[Finding]:
    """Log-probs that are no log-probs, in replies whose parser had no complaint of its own (``protocol``)."""
    bad: list[tuple[OpRecord, str]] = []
    for record in facts.records:
        reply = record.reply
        if reply.faults or not record.op.generates or reply.finish not in FINISHED:
            continue
        if record.op.kind != "score" and record.op.logprobs != "none" and reply.output_ids:
            values = reply.output_logprobs
            if values is None:
                bad.append((record, "log-probs were asked for and none came"))
            elif len(values) != len(reply.output_ids):
                bad.append((record, f"{len(values)} log-probs came for {len(reply.output_ids)} tokens"))
        for what, listed, gap_at in (
            ("output", reply.output_logprobs, -1),
            ("input", reply.input_logprobs, 0),
        ):
            for place, value in enumerate(listed or []):
                if value is None and place == gap_at:
                    continue
                if value is None or not math.isfinite(value) or value > POSITIVE_SLACK:
                    bad.append((record, f"the {what} log-prob at position {place} is {value}"))
                    break
    if not bad:
        return []
    record, text = bad[0]
    return [
        Finding(
            kind="K18",
            oracle=NAME,
            status="mismatch",
            headline=f"{name_of(record)}: {text}",
            owner=name_of(record),
            operations=ids_of(record for record, _ in bad),
            evidence=(f"{len(bad)} such replies; the first is request {record.rid}.",),
            next_step="look at how the engine joins log-probs to tokens for this request",
        )
    ]


def _owner(suspect: Suspect) -> str:
    return name_of(suspect.emitted.record)


def _names(group: list[Suspect]) -> str:
    names = [_owner(suspect) for suspect in group[:4]]
    return "; ".join(names) + (f" and {len(group) - 4} more" if len(group) > 4 else "")
