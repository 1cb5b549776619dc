"""The engine's own word: checks that found a fault, sums that stopped adding up, and how it died.

Adapters name the lines; here only their meaning is known. An engine's check can itself be wrong: a sum that
is over its total, with nothing else to show for it, is K16 and no leak (``confirm_over_count``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_kvcheck.findings import Finding, some
from pytest_kvcheck.observe.logs import LogEvent, of_meaning
from pytest_kvcheck.observe.timeline import PARTS, pool_of, unaccounted
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import NO_KIND, ids_of, requests
from pytest_kvcheck.oracles.conservation import used_of
from pytest_kvcheck.oracles.owner import attribute, broken_accounts

NAME = "engine_log"
CUT = 300


def judge_engine_log(facts: CaseFacts) -> list[Finding]:
    """One finding a kind and pool for leak lines; else a broken series; a crash where no leak explains it."""
    found = [_leak(facts, group) for group in _groups(of_meaning(facts.log, "leak"))]
    told = {finding.pool for finding in found}
    found += [f for pool in _pools(facts.log) if pool not in told for f in _series(facts, pool)]
    fatal = [event for event in of_meaning(facts.log, "fatal") if not _while_stopping(facts, event)]
    if (fatal or _died(facts)) and not of_meaning(facts.log, "leak"):
        found.append(_crash(facts, fatal))
    return found


def _groups(events: Iterable[LogEvent]) -> list[list[LogEvent]]:
    groups: dict[tuple[str, str], list[LogEvent]] = {}
    for event in events:
        groups.setdefault((event.kind, pool_of(event)), []).append(event)
    return list(groups.values())


def _pools(events: list[LogEvent]) -> list[str]:
    return list(dict.fromkeys(pool_of(event) for event in of_meaning(events, "account")))


def _died(facts: CaseFacts) -> bool:
    return not facts.server.alive


def _while_stopping(facts: CaseFacts, event: LogEvent) -> bool:
    """Engines end their children by signals: what they say of it after our last operation is no news."""
    last = max((record.ended for record in facts.records), default=0.0)
    return facts.server.stopped and facts.server.alive and event.t > last


def lost_tokens(event: LogEvent) -> int | None:
    """Total less what the line accounts for: above 0 lost, below 0 counted twice, None: not said."""
    total = event.fields.get("total")
    if not isinstance(total, int):
        return None
    if isinstance(accounted := event.fields.get("accounted"), int):
        return total - accounted
    parts = [event.fields.get(name) for name in PARTS]
    numbers = [part for part in parts if isinstance(part, int)]
    return total - sum(numbers) if numbers else None


def _leak(facts: CaseFacts, events: list[LogEvent]) -> Finding:
    # A traceback quotes the line that raised it, without numbers, before the message that has them.
    first = next((event for event in events if lost_tokens(event) is not None), events[0])
    rows = first.kind == "K11"
    lost = lost_tokens(first)
    page = facts.cell.features.page_size
    pages = first.fields.get("pages")
    if not isinstance(pages, int):
        pages = lost // page if lost and lost > 0 and lost % page == 0 and not rows else None
    pool = pool_of(first) if "pool" in first.fields or lost is not None else None
    over = lost is not None and lost < 0
    # A check that counts too much is a page freed twice, or counts one page twice itself.
    why = attribute(facts, pool or "full", None if rows or not lost else abs(lost))
    kind = "K12" if over and not rows else first.kind or "K01"
    if kind == "K01":
        kind = why.kinds[0]
    unit = "rows" if rows else "tokens"
    amount = (
        f"{abs(lost)} {unit} {'too many' if over else 'missing'}" if lost else "an account that does not fit"
    )
    evidence = [f"Log line {first.line}: {first.text[:CUT]}"]
    if len(events) > 1:
        evidence.append(f"{len(events)} such lines.")
    if _died(facts):
        evidence.append(f"The server ended after it (exit status {facts.server.exit_code}).")
    return Finding(
        kind=kind,
        oracle=NAME,
        status="mismatch" if kind == "K13" else "leak",
        headline=f"the engine's own check found {amount}" + (f" in pool {pool}" if pool else ""),
        tokens=abs(lost) if lost and not rows else None,
        pages=pages,
        pool=pool,
        owner=why.owner,
        operations=why.operations,
        evidence=(*evidence, *why.evidence),
        next_step="replay the trace with the check on every iteration: the first line names the step",
        also=tuple(dict.fromkeys((*_over(over, page), *(k for k in why.kinds if k != kind)))),
    )


def _over(over: bool, page: int) -> tuple[str, ...]:
    """What else a sum above its total may be: a check that counts twice, or a page freed with live tokens."""
    return () if not over else ("K16", "K15") if page > 1 else ("K16",)


def _series(facts: CaseFacts, pool: str) -> list[Finding]:
    """Sums that broke and stayed broken although no check of the engine spoke up."""
    broken = broken_accounts(facts, pool)
    if not broken:
        return []
    first = next(event for event in broken if unaccounted(event))
    lost = unaccounted(broken[-1]) or 0
    page = facts.cell.features.page_size
    why = attribute(facts, pool, abs(lost))
    kind = "K12" if lost < 0 else "K14" if pool != "full" else why.kinds[0]
    return [
        Finding(
            kind=kind,
            oracle=NAME,
            status="leak",
            headline=(
                f"pool {pool}: the engine's own account stopped adding up at log line {first.line}: "
                f"{some(abs(lost), 'token')} {'too many' if lost < 0 else 'missing'} at the end"
            ),
            tokens=abs(lost),
            pages=abs(lost) // page if lost % page == 0 else None,
            pool=pool,
            owner=why.owner,
            operations=why.operations,
            evidence=(f"Log line {first.line}: {first.text[:CUT]}", *why.evidence),
            next_step="look at what the operations in flight at that line released",
            also=tuple(dict.fromkeys((*_over(lost < 0, page), *(k for k in why.kinds if k != kind)))),
        )
    ]


def confirm_over_count(facts: CaseFacts, found: list[Finding]) -> list[Finding]:
    """Turns an engine check's "too many" into K16, a false alarm, where nothing else agrees with it.

    At rest the gauges were read and fit, no other oracle has a finding, no page was named as freed twice: then
    the check counts something twice itself. Where it killed the server nobody can tell, and K12 stands.
    """
    lonely = all(finding.oracle == NAME for finding in found)
    gauges = facts.idle.pools if facts.idle is not None and facts.idle_reached else []
    fits = bool(gauges) and all(used_of(gauge) == 0 or facts.server.attached for gauge in gauges)
    if not (lonely and fits and facts.server.alive and all(_over_count(finding) for finding in found)):
        return found
    return [
        Finding(
            kind="K16",
            oracle=NAME,
            status="mismatch",
            headline=f"the engine's check raised a false alarm: {finding.headline}",
            pool=finding.pool,
            evidence=(*finding.evidence, "At rest every pool is whole, and no other check found anything."),
            next_step="the check counts something twice: compare it with the release notes of this version",
            also=("K12",),
        )
        for finding in found
    ]


def _over_count(finding: Finding) -> bool:
    return finding.oracle == NAME and "K16" in finding.also


def _exception(line: str, tail: Sequence[str]) -> str:
    """The fatal line; where it only announces a traceback, with the exception that this ends in."""
    raised = [text for text in tail if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", text)]
    if not line.rstrip().endswith("Traceback (most recent call last):") or not raised:
        return line
    return f"{line.rpartition('Traceback')[0].rstrip(' :')}: {raised[-1]}"


def _crash(facts: CaseFacts, fatal: list[LogEvent]) -> Finding:
    server = facts.server
    head = (
        f"the server ended by itself (exit status {server.exit_code})" if _died(facts) else "the engine failed"
    )
    said = _exception(fatal[0].text, facts.log_tail)[:CUT] if fatal else ""
    tail = facts.log_tail[-12:]
    cut = sorted((r for r in requests(facts.records) if r.reply.finish == "error"), key=lambda r: r.ended)
    return Finding(
        kind=(fatal[0].kind if fatal else "") or NO_KIND,
        oracle=NAME,
        status="crash",
        headline=f"{head}: {said}" if said else head,
        operations=ids_of(cut),
        evidence=(
            *(f"Log line {event.line}: {event.text[:CUT]}" for event in fatal[:3]),
            *(
                (f"Last lines of its log:\n    {chr(10).join(tail).replace(chr(10), chr(10) + '    ')}",)
                if tail
                else ()
            ),
        ),
        next_step=f"read {facts.log_path or 'the log'} before its first fatal line",
    )
