"""Soak: after equal batches, with the server at rest, what it holds must not grow from batch to batch.

This sees what comes back only at the very end (a server restarted, a cache swept), which the account after
the case does not. Batches are marked by waits that are labelled ``batch 3 at rest``.
"""

from __future__ import annotations

import re
from itertools import pairwise

from pytest_kvcheck.findings import Finding
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.conservation import foreign, used_of
from pytest_kvcheck.oracles.owner import attribute
from pytest_kvcheck.trace import GaugeSample

NAME = "soak"
AT_REST = re.compile(r"batch (\d+) at rest")
# The first batch may fill what is filled only once; three steps after it are the fewest that make a slope.
FEWEST = 4


def judge_soak(facts: CaseFacts) -> list[Finding]:
    """A leak where a pool's used count never fell and rose in most steps after the first batch."""
    rests = _rests(facts)
    if len(rests) < FEWEST or (facts.server.attached and foreign(facts)):
        return []
    return [found for pool in (gauge.pool for gauge in rests[0].pools) for found in _judge(facts, pool, rests)]


def _rests(facts: CaseFacts) -> list[GaugeSample]:
    """The last reading of each rest, where one was taken while nothing ran."""
    found = []
    for record in facts.of_phase("workload"):
        if record.op.kind != "wait" or not AT_REST.match(record.op.label):
            continue
        inside = [s for s in facts.samples if record.started <= s.t <= record.ended and not s.error]
        quiet = [s for s in inside if not s.running and not s.waiting]
        found += quiet[-1:]
    return found


def _judge(facts: CaseFacts, pool: str, rests: list[GaugeSample]) -> list[Finding]:
    gauges = [sample.pool(pool) for sample in rests]
    used = [count for gauge in gauges if gauge is not None and (count := used_of(gauge)) is not None]
    steps = [after - before for before, after in pairwise(used[1:])]
    if len(steps) < FEWEST - 2 or min(steps) < 0 or sum(step > 0 for step in steps) * 2 <= len(steps):
        return []
    grown = used[-1] - used[1]
    why = attribute(facts, pool, grown)
    return [
        Finding(
            kind="K14" if pool != "full" else why.kinds[0],
            oracle=NAME,
            status="leak",
            headline=(
                f"pool {pool}: {grown} tokens more are held after batch {len(used)} than after batch 2, though "
                "all batches are equal (expected 0 more)"
            ),
            tokens=grown,
            pool=pool,
            owner=None,
            evidence=(f"Held at rest, batch by batch: {', '.join(map(str, used))}.", *why.evidence),
            next_step="run one batch alone: what it leaves is the same each time",
            also=tuple(kind for kind in why.kinds[1:]),
        )
    ]
