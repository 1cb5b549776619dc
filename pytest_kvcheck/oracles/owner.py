"""Who lost the tokens: joins the ledger with the engine's own series and lines, and says what that rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pytest_kvcheck.findings import some
from pytest_kvcheck.ledger import sessions
from pytest_kvcheck.observe.logs import LogEvent, of_meaning
from pytest_kvcheck.observe.timeline import READ_DELAY, explain_break, pool_of, unaccounted
from pytest_kvcheck.operations import OVERLAP
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import (
    closed_in_flight,
    ids_of,
    name_of,
    names,
    requests,
    timed_out_sessions,
    turns_of,
)
from pytest_kvcheck.oracles.kept import kept_for
from pytest_kvcheck.trace import FINISHED, OpRecord

# How a request went, the kind of fault that this points to, and the words for it; gravest suspicion first.
WAYS: tuple[tuple[str, str], ...] = (
    ("taken beside another turn", "K07"),
    ("closed in flight", "K09"),
    ("timed out", "K09"),
    ("disconnected", "K04"),
    ("aborted", "K03"),
    ("retracted", "K05"),
)


@dataclass(frozen=True, slots=True)
class Attribution:
    """``owner`` None: not known, ``evidence`` says why. ``kinds``: likeliest first, never empty.

    ``operations``: ids of what it points to, at most a few; a minimiser looks there first.
    """

    owner: str | None
    kinds: tuple[str, ...]
    evidence: tuple[str, ...]
    operations: tuple[int, ...] = ()


def _asked(facts: CaseFacts) -> list[OpRecord]:
    """The workload's requests; those before it where the server did not live to see it."""
    return requests(facts.of_phase("workload")) or requests(facts.records)


def candidates(facts: CaseFacts) -> dict[str, list[OpRecord]]:
    """Requests that did not go the plain way, by how they went."""
    asked = _asked(facts)
    # A check that ends the server leaves those in flight without an answer that says how they went.
    cut = {r.op.id for r in asked if r.reply.finish == "error" and not facts.server.alive}
    retracting = bool(of_meaning(facts.log, "retract"))
    stopped = {
        r.op.target for r in facts.of_phase("workload") if r.op.kind == "abort" and r.reply.finish == "stop"
    }
    found = {
        "taken beside another turn": [
            r for r in asked if r.op.invalid == OVERLAP and (r.reply.finish in FINISHED or r.op.id in cut)
        ],
        "closed in flight": closed_in_flight(facts),
        "timed out": timed_out_sessions(facts),
        "disconnected": [r for r in asked if r.reply.finish in ("disconnected", "timeout")],
        "aborted": [r for r in asked if r.reply.finish in ("abort", "rejected") or r.op.id in cut & stopped],
        "retracted": [r for r in asked if r.reply.retractions or (retracting and r.op.id in cut)],
    }
    return {way: records for way, records in found.items() if records}


def attribute(facts: CaseFacts, pool: str, tokens: int | None, rows: int | None = None) -> Attribution:
    """The likeliest loser of ``tokens`` tokens of a pool, or of ``rows`` request rows."""
    ways = candidates(facts)
    found = _by_blocks(facts, pool, tokens, ways)
    if found is not None:
        return _with_preemptions(facts, ways, found)
    for attempt in (_by_series, _by_unclosed, _by_release, _by_amount):
        found = attempt(facts, pool, tokens, ways)
        if found is not None:
            break
    else:
        found = _with_preemptions(facts, ways, _by_elimination(ways, rows))
    if facts.kept == [] and pool == "full":
        text = "By the engine's block events, none of it is a full block of the prefix cache."
        found = replace(found, evidence=(*found.evidence, text))
    return found


def _by_blocks(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    """By the engine's own events of cached blocks: whose are those that nothing could overwrite."""
    if not facts.kept or pool != "full":
        return None
    odd = {id(record) for records in ways.values() for record in records}
    owners, text = kept_for(facts.kept, facts.records, odd, tokens)
    if not owners:
        return None
    kinds = dict.fromkeys(kind for record in owners for kind in _kinds(record, ways)[:1])
    first = tuple(kinds) if len(kinds) == 1 else _kinds(None, ways)
    kinds_found = tuple(dict.fromkeys((*first, *_kinds(None, ways))))
    return Attribution(names(owners, 3), kinds_found, text, ids_of(owners))


def _with_preemptions(facts: CaseFacts, ways: dict[str, list[OpRecord]], found: Attribution) -> Attribution:
    """Adds what an engine says that counts preemptions but does not tell whose (vLLM)."""
    samples = [s for s in (facts.baseline, *facts.samples, facts.idle) if s is not None]
    totals = [s.retracted_total for s in samples if s.retracted_total is not None]
    count = max(totals, default=0) - min(totals, default=0)
    if not count or "retracted" in ways:
        return found
    kinds = (*found.kinds, "K05") if ways else ("K05", *found.kinds)
    text = f"The engine counted {count} preemptions meanwhile; it does not say of which requests."
    return replace(found, kinds=tuple(dict.fromkeys(kinds)), evidence=(*found.evidence, text))


def _kinds(record: OpRecord | None, ways: dict[str, list[OpRecord]]) -> tuple[str, ...]:
    """Kinds that this request's way points to, then those of all other ways in the plan, K01 among them."""
    mine = [kind for way, kind in WAYS if record is not None and any(r is record for r in ways.get(way, ()))]
    every = [kind for way, kind in WAYS if way in ways]
    # With no way of its own to blame, or several that it may have been: a tail that nobody freed.
    first = mine or (every if len(set(every)) == 1 else ["K01"])
    return tuple(dict.fromkeys((*first, *every, "K01")))


def _by_series(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    found = explain_break(broken_accounts(facts, pool), _asked(facts))
    if found is None:
        return None
    moved = ", ".join(f"{name} {change:+}" for name, change in found.moved.items()) or "nothing else moved"
    evidence = [
        f"By the engine's own series: log line {found.event.line} is the first whose sum is short "
        f"(by {found.lost} tokens; since the iteration before: {moved})."
    ]
    ended = [r for r in found.in_flight if abs(r.ended - found.event.t) <= READ_DELAY]
    odd = [r for r in ended or found.in_flight if any(r in records for records in ways.values())]
    near = odd or ended or list(found.in_flight)
    if len(near) == 1:
        return Attribution(name_of(near[0]), _kinds(near[0], ways), tuple(evidence), ids_of(near))
    evidence.append(f"In flight then: {names(near)}." if near else "No request of ours was in flight then.")
    first = {_kinds(record, ways)[0] for record in odd}
    kinds = _kinds(odd[0] if len(first) == 1 else None, ways)
    return Attribution(None, kinds, tuple(evidence), ids_of(near))


def broken_accounts(facts: CaseFacts, pool: str) -> list[LogEvent]:
    """The pool's accounts from the last good one on, up to the idle reading; empty where the last one adds up.

    A sum that is short once and right again was read between two steps of the engine. What comes after the
    idle reading may follow a flush, which mends every sum.
    """
    until = facts.idle.t + READ_DELAY if facts.idle is not None else math.inf
    events = [e for e in of_meaning(facts.log, "account") if pool_of(e) == pool and e.t <= until]
    sums = [unaccounted(event) for event in events]
    if not sums or not sums[-1]:
        return []
    good = max((at for at, lost in enumerate(sums) if not lost), default=0)
    return events[good:]


def _by_unclosed(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    """By the log: sessions that were asked to close, and that the engine never said it had closed."""
    lines: dict[str, dict[str, int]] = {}
    for event in of_meaning(facts.log, "session"):
        lines.setdefault(event.rule, {}).setdefault(str(event.fields.get("session", "")), event.line)
    deferred = lines.get("session-deferred", {})
    ended = set(lines.get("session-closed", {})) | (set(lines.get("session-timeout", {})) - set(deferred))
    records = list(facts.of_phase("workload", "drain"))
    asked = {r.op.session for r in records if r.op.kind == "close" or (r.op.kind == "open" and r.op.timeout)}
    ids = {r.op.session: r.reply.session_id for r in records if r.op.kind == "open" and r.reply.session_id}
    known = {name: sid for name, sid in ids.items() if name in asked and sid in lines.get("session-opened", {})}
    open_still = {name: sid for name, sid in known.items() if sid not in ended}
    turns = turns_of(facts)
    last = [turns[name][-1] for name in open_still if name in turns]
    if not last or not ended:
        return None
    text = f"By the log's lines, {len(open_still)} of {some(len(known), 'closed session')} never closed"
    put_off = [deferred[sid] for sid in open_still.values() if sid in deferred]
    if put_off:
        text += f"; {len(put_off)} waited for a request to end (first at log line {min(put_off)})"
    how = ", ".join(sorted({record.reply.finish or "no answer" for record in last}))
    odd = [r for records in ways.values() for r in records if r.op.session == last[0].op.session]
    return Attribution(
        names(last, 3),
        tuple(dict.fromkeys(("K09", *_kinds(odd[-1] if odd else None, ways)))),
        (f"{text}. Their last turns ended as: {how}.",),
        ids_of(last),
    )


def _by_release(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    """By ``Session KV released`` lines: the one closed session that has none, if it held as many tokens."""
    released = {
        str(event.fields["session"])
        for event in of_meaning(facts.log, "session")
        if "session" in event.fields and "tokens" in event.fields
    }
    opened = {
        r.op.session: r for r in facts.of_phase("workload") if r.op.kind == "open" and r.op.session is not None
    }
    finished = {session for session, turns in turns_of(facts).items() if any(t.reply.output_ids for t in turns)}
    silent = [
        record
        for session, record in opened.items()
        if session in finished and record.reply.session_id not in released and session not in released
    ]
    page = facts.cell.features.page_size
    if len(silent) != 1 or not released or tokens not in _held(silent[0], _totals(facts), page):
        return None
    session = silent[0].op.session
    odd = [r for records in ways.values() for r in records if r.op.session == session]
    return Attribution(
        f"session {session}",
        _kinds(odd[0] if odd else silent[0], ways),
        (f"By the log's release lines: {len(released)} sessions have one, session {session} has none.",),
        ids_of((silent[0], *odd)),
    )


def _by_amount(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    """By the amount: the one request, or the one sort of requests, that held exactly as many tokens.

    Several fits say nothing: with coarse pages nearly everything has the same size.
    """
    if not tokens:
        return None
    page = facts.cell.features.page_size
    totals = _totals(facts)
    odd = {id(record): record for records in ways.values() for record in records}
    single = [record for record in odd.values() if tokens in _held(record, totals, page)]
    if len(single) == 1 and (len(odd) == 1 or tokens > page):
        text = (
            f"By the amount: {tokens} tokens are what {name_of(single[0])} held, and no other odd request did."
        )
        return Attribution(name_of(single[0]), _kinds(single[0], ways), (text,), ids_of(single))
    fits: dict[str, str] = {}
    for way, records in ways.items():
        if len(records) > 1 and tokens in map(
            sum, zip(*(_held(r, totals, page) for r in records), strict=True)
        ):
            fits[way] = f"{tokens} tokens are what the {len(records)} {way} held together ({names(records, 3)})"
    locked = _published(facts, page)
    if tokens in locked:
        fits["locked"] = (
            f"{tokens} tokens are what the plan's requests published to the prefix cache and locked"
        )
    if len(fits) != 1:
        return None
    ((way, text),) = fits.items()
    kinds = ("K10", *_kinds(None, ways)) if way == "locked" else _kinds(ways[way][0], ways)
    return Attribution(None, kinds, (f"By the amount: {text}.",))


def _totals(facts: CaseFacts) -> dict[str, int]:
    """How many tokens each session's history had in the end."""
    return {name: len(ledger.history) for name, ledger in sessions(facts.of_phase("workload")).items()}


def _held(record: OpRecord, totals: dict[str, int], page: int) -> tuple[int, ...]:
    """How many tokens a request, or the session that an open began, may have held: one number a way to count.

    With and without the last token (its KV is not computed yet), in tokens and rounded up to pages; the whole
    sequence, the turn's own part, and the history alone.
    """
    own = len(record.op.input_ids) + len(record.reply.output_ids)
    whole = totals.get(record.op.session or "", 0) if record.op.kind == "open" else record.history + own
    counts = (whole, whole - 1, own, own - 1, record.history)
    return tuple(count for tokens in counts for count in (tokens, -(-tokens // page) * page))


def _published(facts: CaseFacts, page: int) -> set[int]:
    """What an engine may have locked in its prefix cache: first prompts of sessions, plain requests, both."""
    done = [r for r in _asked(facts) if r.reply.finish in FINISHED]
    first = [len(r.op.input_ids) for r in done if r.op.kind == "turn" and r.history == 0]
    plain = [len(r.op.input_ids) for r in done if r.op.kind == "generate"]
    sums = (sum(length // page * page for length in lengths) for lengths in (first, plain, first + plain))
    return {total for total in sums if total}


def _by_elimination(ways: dict[str, list[OpRecord]], rows: int | None) -> Attribution:
    odd = [record for records in ways.values() for record in records]
    equal = [way for way, records in ways.items() if len(records) == rows]
    if len(equal) == 1 and len(ways) > 1:
        text = f"By the number: {rows} rows are gone, and {rows} {equal[0]} ({names(ways[equal[0]])})."
        return Attribution(None, _kinds(ways[equal[0]][0], ways), (text,), ids_of(ways[equal[0]]))
    if len({id(record) for record in odd}) == 1:
        text = "By elimination: it is the only request of the plan that did not go the plain way."
        return Attribution(name_of(odd[0]), _kinds(odd[0], ways), (text,), ids_of(odd))
    text = "Owner not known: only totals were seen, no account of single iterations."
    if odd:
        text += " Candidates: " + "; ".join(
            f"{len(records)} {way} ({names(records, 3)})" for way, records in ways.items()
        )
    return Attribution(None, _kinds(None, ways), (text,))
