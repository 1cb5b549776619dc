"""Who lost the tokens: joins the ledger with the engine's own series and lines, and says what that rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_kvcheck.observe.logs import LogEvent, of_meaning
from pytest_kvcheck.observe.timeline import READ_DELAY, explain_break, pool_of, unaccounted
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import (
    closed_in_flight,
    name_of,
    names,
    requests,
    timed_out_sessions,
    turns_of,
)
from pytest_kvcheck.trace import OpRecord

# How a request went, the kind of fault that this points to, and the words for it; gravest suspicion first.
WAYS: tuple[tuple[str, str], ...] = (
    ("closed in flight", "K09"),
    ("timed out", "K09"),
    ("disconnected", "K04"),
    ("aborted", "K03"),
    ("retracted", "K05"),
)


@dataclass(frozen=True, slots=True)
class Attribution:
    """``owner`` None: not known, ``evidence`` says why. ``kinds``: likeliest first, never empty."""

    owner: str | None
    kinds: tuple[str, ...]
    evidence: tuple[str, ...]


def candidates(facts: CaseFacts) -> dict[str, list[OpRecord]]:
    """Requests that did not go the plain way, by how they went."""
    asked = requests(facts.of_phase("workload"))
    found = {
        "closed in flight": closed_in_flight(facts),
        "timed out": timed_out_sessions(facts),
        "disconnected": [r for r in asked if r.reply.finish in ("disconnected", "timeout")],
        "aborted": [r for r in asked if r.reply.finish in ("abort", "rejected")],
        "retracted": [r for r in asked if r.reply.retractions],
    }
    return {way: records for way, records in found.items() if records}


def attribute(facts: CaseFacts, pool: str, tokens: int | None) -> Attribution:
    """The likeliest loser of ``tokens`` tokens of a pool."""
    ways = candidates(facts)
    for attempt in (_by_series, _by_release, _by_amount):
        found = attempt(facts, pool, tokens, ways)
        if found is not None:
            return found
    return _by_elimination(ways)


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
    found = explain_break(broken_accounts(facts, pool), requests(facts.of_phase("workload")))
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
        return Attribution(name_of(near[0]), _kinds(near[0], ways), tuple(evidence))
    evidence.append(f"In flight then: {names(near)}." if near else "No request of ours was in flight then.")
    first = {_kinds(record, ways)[0] for record in odd}
    return Attribution(None, _kinds(odd[0] if len(first) == 1 else None, ways), tuple(evidence))


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


def _by_release(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    """By ``Session KV released`` lines: the one closed session that has none while others have."""
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
    if len(silent) != 1 or not released:
        return None
    session = silent[0].op.session
    odd = [r for records in ways.values() for r in records if r.op.session == session]
    return Attribution(
        f"session {session}",
        _kinds(odd[0] if odd else silent[0], ways),
        (f"By the log's release lines: {len(released)} sessions have one, session {session} has none.",),
    )


def _by_amount(
    facts: CaseFacts, pool: str, tokens: int | None, ways: dict[str, list[OpRecord]]
) -> Attribution | None:
    """By the amount: the only odd request that ever held as many tokens, rounded up to pages."""
    page = facts.cell.features.page_size
    if not tokens:
        return None
    fitting = {
        id(record): record
        for records in ways.values()
        for record in records
        for held in (record.history + len(record.op.input_ids) + len(record.reply.output_ids), record.history)
        if held and tokens in (held, held - 1, -(-held // page) * page)
    }
    # With coarse pages nearly everything has the same size: the amount says nothing there.
    if len(fitting) != 1 or (sum(map(len, ways.values())) > 1 and tokens <= page):
        return None
    (record,) = fitting.values()
    text = f"By the amount only: {tokens} tokens are what {name_of(record)} held, and no other odd request did."
    return Attribution(name_of(record), _kinds(record, ways), (text,))


def _by_elimination(ways: dict[str, list[OpRecord]]) -> Attribution:
    odd = [record for records in ways.values() for record in records]
    if len({id(record) for record in odd}) == 1:
        text = "By elimination: it is the only request of the plan that did not go the plain way."
        return Attribution(name_of(odd[0]), _kinds(odd[0], ways), (text,))
    text = "Owner not known: only totals were seen, no account of single iterations."
    if odd:
        text += " Candidates: " + "; ".join(
            f"{len(records)} {way} ({names(records, 3)})" for way, records in ways.items()
        )
    return Attribution(None, _kinds(None, ways), (text,))
