"""Conservation: at rest, before any flush, every slot of every pool is free or evictable again.

The rule for a server of our own: no session, no request, so ``used == 0`` and ``available + evictable ==
total``. For a server that was attached to, others may hold KV: it is judged against its baseline.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from pytest_kvcheck.findings import Finding, some
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import NO_KIND
from pytest_kvcheck.oracles.owner import Attribution, attribute
from pytest_kvcheck.trace import GaugeSample, PoolGauge

NAME = "conservation"


def judge_conservation(facts: CaseFacts) -> list[Finding]:
    """One finding a pool and kind; a gauge that should be there and is not is a finding too."""
    if not facts.server.alive or not facts.idle_reached:
        return []  # a dead server has no account and a busy one no verdict: engine_log and liveness say so
    if facts.idle is None:
        return [_unread("no account of the server at rest was taken", ())]
    found = _gaps(facts, facts.idle)
    if facts.server.attached and (reason := foreign(facts)):
        grown = [name for name, used in _growth(facts).items() if used]
        return [*found, _unread(f"pool {', '.join(grown)} changed, but {reason}", ())] if grown else found
    for gauge in facts.idle.pools:
        found += _judge_pool(facts, gauge)
    return found


# --- what the gauges say -------------------------------------------------------------------------------
def used_of(gauge: PoolGauge) -> int | None:
    """Tokens that are neither free nor evictable, by the gauge itself or by its parts; None: not told."""
    if gauge.used is not None:
        return gauge.used
    return _missing_from_sum(gauge)


def _missing_from_sum(gauge: PoolGauge) -> int | None:
    if gauge.total is None or gauge.available is None or gauge.evictable is None:
        return None
    return gauge.total - gauge.available - gauge.evictable


def _before(facts: CaseFacts, pool: str) -> int:
    gauge = facts.baseline.pool(pool) if facts.baseline is not None else None
    return (used_of(gauge) or 0) if gauge is not None else 0


def _growth(facts: CaseFacts) -> dict[str, int]:
    """How many more tokens each pool holds than before the case."""
    pools = facts.idle.pools if facts.idle is not None else []
    return {gauge.pool: (used_of(gauge) or 0) - _before(facts, gauge.pool) for gauge in pools}


def foreign(facts: CaseFacts) -> str:
    """Why others may have changed an attached server's account meanwhile, or ""."""
    for when, sample in (("before", facts.baseline), ("after", facts.idle)):
        if sample is not None and (sample.running or sample.waiting):
            return f"requests that are not ours were running {when} the case"
        if sample is not None and sample.sessions:
            return f"{sample.sessions} sessions that are not ours were open {when} the case"
    return ""


def _gaps(facts: CaseFacts, idle: GaugeSample) -> list[Finding]:
    lacks = facts.promises.lacks
    missing = [name for name in idle.missing if name not in lacks and name.split(":")[-1] not in lacks]
    blind = [gauge.pool for gauge in idle.pools if used_of(gauge) is None and gauge.pool not in lacks]
    evidence = tuple(
        text
        for text in (
            f"Missing: {', '.join(missing)}." if missing else "",
            f"The reading failed: {idle.error}." if idle.error else "",
            f"Neither used nor total and available are known of pool {', '.join(blind)}." if blind else "",
            "The account names no pool at all." if not idle.pools and not idle.error else "",
        )
        if text
    )
    if not evidence:
        return []
    names = ", ".join([*missing, *blind]) or "account"
    return [
        _unread(
            f"the {names} of {facts.engine} {facts.engine_version or '(version unknown)'} is absent", evidence
        )
    ]


def _unread(what: str, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        kind=NO_KIND,
        oracle=NAME,
        status="inconclusive",
        headline=f"memory could not be judged: {what}",
        evidence=evidence,
        next_step="see whether the engine renamed a metric or needs a flag to publish it (kvcheck doctor)",
    )


# --- the verdict ---------------------------------------------------------------------------------------
def _judge_pool(facts: CaseFacts, gauge: PoolGauge) -> list[Finding]:
    used = used_of(gauge)
    if used is None:
        return []
    by_sum = _missing_from_sum(gauge)
    if gauge.used is not None and by_sum is not None and used != by_sum and 0 in (used, by_sum):
        what = f"pool {gauge.pool}: used is {used}, but total less available less evictable is {by_sum}"
        return [_unread(what, (_account(gauge), "One of the two sources is stale."))]
    before = _before(facts, gauge.pool)
    over = _counted_twice(gauge, used)
    if over and not (facts.server.attached and used >= before):
        return [_double_free(facts, gauge, over)]
    # What a session server of ours held before the case, it lost before; it is told, and not charged twice.
    lost = used - before if facts.server.attached or used > before else used
    if lost <= 0:
        return []
    own = used > before
    found: list[Finding] = []
    rest = lost
    # Outputs are cached behind the prompts that were probed, so where most of it is locked, all of it is.
    locked = rest if 2 * _pinned(facts, gauge) >= rest else 0
    for part, kind in (("protected", "K10"), ("session_held", "K09")):
        amount = min(rest, _part(facts, gauge, part) or (locked if part == "protected" else 0))
        if amount > 0:
            found.append(_leak(facts, gauge, amount, kind, part, own))
            rest -= amount
    if rest > 0:
        found.append(_leak(facts, gauge, rest, "", "", own))
    return found


def _part(facts: CaseFacts, gauge: PoolGauge, name: str) -> int:
    value: int = getattr(gauge, name) or 0
    earlier = facts.baseline.pool(gauge.pool) if facts.baseline is not None else None
    if facts.server.attached and earlier is not None:
        value -= getattr(earlier, name) or 0
    return value


def _pinned(facts: CaseFacts, gauge: PoolGauge) -> int:
    """How many tokens the pin probe hit beyond those that the account at rest calls evictable: locked ones.

    Only for an account that does not tell them itself. Prompts that share a beginning are counted once.
    """
    if gauge.protected is not None or gauge.evictable is None or gauge.pool != "full":
        return 0
    hit, had = 0, 0
    last: tuple[int, ...] = ()
    probes = [r for r in facts.of_phase("probe") if r.op.label.startswith("pin ")]
    for record in sorted(probes, key=lambda r: r.op.input_ids):
        ids, cached = record.op.input_ids, record.reply.cached_tokens or 0
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, last, strict=False)))
        hit += max(0, cached - min(shared, had))
        last, had = ids, cached
    return max(0, hit - gauge.evictable)


def _counted_twice(gauge: PoolGauge, used: int) -> int:
    """How many tokens the account has too many; 0 where it has none."""
    return max(0, -used, -(_missing_from_sum(gauge) or 0))


def _double_free(facts: CaseFacts, gauge: PoolGauge, over: int) -> Finding:
    why = attribute(facts, gauge.pool, over)
    return Finding(
        kind="K12",
        oracle=NAME,
        status="leak",
        headline=(
            f"pool {gauge.pool}: {some(over, 'token')} too many free or evictable "
            f"(expected at most {gauge.total}, found {(gauge.total or 0) + over})"
        ),
        tokens=over,
        pages=_whole_pages(over, facts),
        pool=gauge.pool,
        owner=why.owner,
        operations=why.operations,
        evidence=(_account(gauge), *why.evidence),
        next_step="slots were freed twice: look for two releases of one request's last page",
        also=tuple(
            kind for kind in ("K14" if gauge.pool != "full" else "K15", "K16", *why.kinds) if kind != "K01"
        ),
    )


def _leak(facts: CaseFacts, gauge: PoolGauge, amount: int, kind: str, part: str, own: bool) -> Finding:
    why = attribute(facts, gauge.pool, amount)
    if part == "protected":
        why = replace(why, kinds=("K10", *why.kinds))
    elif part == "session_held":
        why = replace(why, kinds=("K09", "K01", *why.kinds))
    rows = gauge.pool in ("rows", "req_to_token")
    first = "K11" if rows else "K14" if gauge.pool != "full" and kind != "K10" else why.kinds[0]
    pages = None if rows else _whole_pages(amount, facts)
    also = [other for other in why.kinds if other != first]
    if pages is None and not rows:
        also.append("K15")
    if gauge.protected is None and first != "K10":
        also.append("K10")  # the account does not tell what is lost from what is only locked
    size = some(amount, "row" if rows else "token") + (
        f" ({some(pages, 'page')})" if pages is not None and facts.cell.features.page_size > 1 else ""
    )
    held = {
        "protected": "still locked (protected) though no request and no session is left",
        "session_held": "still charged to sessions (session_held) though every session was closed",
    }.get(part, "not given back")
    evidence = [_account(gauge)]
    if part == "protected" and gauge.protected is None:
        evidence.append("The same prompts, sent again before any flush, still hit more than is evictable.")
    if not own:
        evidence.append(
            "They were gone before this case's first operation: an earlier case or the start lost them."
        )
    if pages is None and not rows:
        evidence.append(f"{amount} is no whole number of pages of {facts.cell.features.page_size}.")
    return Finding(
        kind=first,
        oracle=NAME,
        status="leak",
        headline=f"pool {gauge.pool}: {size} {held} (expected 0 at rest, before any flush)",
        tokens=None if rows else amount,
        pages=pages,
        pool=gauge.pool,
        owner=why.owner if own else None,
        operations=why.operations if own else (),
        evidence=(*evidence, *why.evidence) if own else tuple(evidence),
        next_step=_next_step(why, part),
        also=tuple(dict.fromkeys(also)),
    )


def _next_step(why: Attribution, part: str) -> str:
    if part == "protected":
        return "look for a finish path that does not release the lock on the request's cached prefix"
    if part == "session_held":
        return "look at what a session's close releases, in flight, deferred and after a timeout too"
    what = (
        f"follow what releases the slots of {why.owner}"
        if why.owner
        else "look at what releases the slots of the plan's requests"
    )
    return f"{what}; a flush would hide it"


def _whole_pages(tokens: int, facts: CaseFacts) -> int | None:
    page = facts.cell.features.page_size
    return tokens // page if tokens % page == 0 else None


def _account(gauge: PoolGauge) -> str:
    names = ("total", "used", "available", "evictable", "protected", "session_held", "uncached")
    known = [f"{name}={getattr(gauge, name)}" for name in names if getattr(gauge, name) is not None]
    return f"Account at rest: [{gauge.pool}] {', '.join(known)}."
