"""Liveness: a fresh request completes, what waits is served, and the server comes to rest when all is over."""

from __future__ import annotations

import statistics

from pytest_kvcheck.findings import Finding, Status
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import LAG_LIMIT, NO_KIND, ids_of, name_of, names, requests, starved
from pytest_kvcheck.oracles.owner import candidates
from pytest_kvcheck.trace import FINISHED, OpRecord

NAME = "liveness"
# A silence this long, and this many times the usual time to a first token, is no slow server any more.
SILENCE, SILENCE_TIMES = 10.0, 20.0
# A server that is still busy this long after the last request ended is not draining.
REST = 10.0


def judge_liveness(facts: CaseFacts) -> list[Finding]:
    """Stuck requests, a dead canary, a server that never rests. A dead process is ``engine_log``'s."""
    if not facts.server.alive:
        return []
    return [*_canary(facts), *_waiting(facts), *_rest(facts)]


# --- the canary ----------------------------------------------------------------------------------------
def _canary(facts: CaseFacts) -> list[Finding]:
    probes = [r for r in facts.of_phase("probe") if r.op.label.startswith("canary")]
    before = [r for r in probes if r.op.label.startswith("canary before")]
    after = [r for r in probes if r not in before]
    failed = [r for r in after if r.reply.finish not in FINISHED]
    if not failed:
        return []
    last = failed[-1]
    waited = f"{last.ended - last.started:.0f} s (deadline {last.op.deadline:.0f} s)"
    answers = [s for s in facts.samples if s.t >= last.started and not s.error] or (
        [facts.idle] if facts.idle is not None and not facts.idle.error else []
    )
    evidence = [f"Canary: {last.reply.finish} after {waited}. {last.reply.message[:200]}".strip()]
    evidence += [f"The server answers control calls all the same ({answers[-1].source})."] if answers else []
    doubt = ""
    if len(failed) < len(after):
        doubt = "another canary of the same case finished"
    elif starved(facts) or last.client_lag > LAG_LIMIT:
        doubt = f"the client itself lagged by {max(facts.client_lag, last.client_lag):.1f} s"
    elif any(r.reply.finish not in FINISHED or r.ended - r.started > r.op.deadline / 2 for r in before):
        doubt = "this launch's canary was as slow before the workload"
    elif last.reply.events and last.reply.finish == "timeout":
        doubt = f"it was being served, only slowly ({len(last.reply.output_ids)} tokens came)"
    return [
        Finding(
            kind="K23",
            oracle=NAME,
            status="inconclusive" if doubt else "stuck",
            headline=(
                f"a fresh request of {len(last.op.input_ids)} + {last.op.max_new_tokens} tokens did not finish "
                f"in {waited}" + (f", but {doubt}" if doubt else " while the server says that it is healthy")
            ),
            evidence=tuple(evidence),
            next_step="look at what the scheduler waits for: its queue, its rows, the batch that it last ran",
            also=("K08", "K04"),
        )
    ]


# --- requests that were never served -------------------------------------------------------------------
def _waiting(facts: CaseFacts) -> list[Finding]:
    asked = requests(facts.of_phase("workload"))
    late = [r for r in asked if r.reply.finish == "timeout"]
    if not late:
        return []
    stuck = [r for r in late if _starved_beside_others(r, asked) or _silence(r, asked)]
    lag = max([facts.client_lag, *(r.client_lag for r in late)])
    status: Status = "stuck" if stuck and lag <= LAG_LIMIT else "inconclusive"
    shown = stuck or late
    first = shown[0]
    served = sum(1 for r in asked if r.reply.finish in FINISHED and r.ended > first.started)
    if status == "stuck":
        why = f"{served} others were served meanwhile" if served else "nothing was served meanwhile"
    elif lag > LAG_LIMIT:
        why = f"the client itself lagged by {lag:.1f} s"
    else:
        why = "the server was working all the time, only slowly"
    return [
        Finding(
            kind="K08",
            oracle=NAME,
            status=status,
            headline=f"{name_of(first)} got no answer in {first.ended - first.started:.0f} s; {why}",
            owner=name_of(first),
            operations=ids_of(shown),
            evidence=(
                f"{len(shown)} requests: {names(shown)}.",
                f"Tokens that they had shown: {', '.join(str(len(r.reply.output_ids)) for r in shown[:8])}.",
                *_gauges_during(facts, first),
            ),
            next_step=(
                "look at what the request waits for: a row or tokens that idle sessions hold"
                if status == "stuck"
                else "give the operations a longer deadline or the machine fewer neighbours"
            ),
            also=("K23", "K07", "K10"),
        )
    ]


def _first_answers(asked: list[OpRecord]) -> float:
    """The usual time to a first token of what was served, in seconds; 0 where nothing was."""
    times = [
        r.first_token - r.started for r in asked if r.reply.finish in FINISHED and r.first_token is not None
    ]
    return statistics.median(times) if times else 0.0


def _starved_beside_others(record: OpRecord, asked: list[OpRecord]) -> bool:
    """No token although others that came later were served, for much longer than a request usually waits."""
    overtaken = any(r.started > record.started and r.reply.finish in FINISHED for r in asked)
    long = record.ended - record.started > max(SILENCE, SILENCE_TIMES * _first_answers(asked))
    return record.first_token is None and overtaken and long


def _silence(record: OpRecord, asked: list[OpRecord]) -> bool:
    """Nothing at all came, from any request, for the end of this one's wait."""
    known = (t for r in asked for t in (r.first_token, r.ended if r.reply.finish in FINISHED else None))
    signs = [t for t in known if t is not None and t < record.ended]
    quiet = record.ended - max([record.started, *signs])
    moving = any(r.reply.finish == "timeout" and r.first_token is not None for r in asked)
    return not moving and quiet > max(SILENCE, SILENCE_TIMES * _first_answers(asked))


def _gauges_during(facts: CaseFacts, record: OpRecord) -> list[str]:
    samples = [s for s in facts.samples if record.started <= s.t <= record.ended and not s.error]
    if not samples:
        return []
    last = samples[-1]
    pools = ", ".join(f"{gauge.pool} used {gauge.used} of {gauge.total}" for gauge in last.pools)
    return [f"Gauges at its end: running {last.running}, waiting {last.waiting}, {pools}."]


# --- coming to rest ------------------------------------------------------------------------------------
def _rest(facts: CaseFacts) -> list[Finding]:
    if facts.idle_reached:
        return []
    idle = facts.idle
    running, waiting = (idle.running, idle.waiting) if idle is not None else (None, None)
    ways = candidates(facts)
    left = [r for way in ("disconnected", "aborted", "closed in flight") for r in ways.get(way, ())]
    doubt = ""
    if facts.server.attached:
        doubt = "others may be using this server"
    elif facts.idle_wait < REST:
        doubt = f"it was given only {facts.idle_wait:.0f} s"
    elif not running and not waiting:
        doubt = "its gauges do not say what it is doing"
    zombie = bool(running)
    return [
        Finding(
            kind="K04" if zombie else "K08" if waiting else NO_KIND,
            oracle=NAME,
            status="inconclusive" if doubt else "stuck",
            headline=(
                f"the server did not come to rest: {running} running, {waiting} waiting {facts.idle_wait:.0f} s"
                " after the last request (expected 0)" + (f", but {doubt}" if doubt else "")
            ),
            owner=name_of(left[0]) if len(left) == 1 else None,
            operations=ids_of(left),
            evidence=(
                f"Ended early by the client: {names(left)}." if left else "No request was ended early.",
                *((f"Reading: {idle.error}",) if idle is not None and idle.error else ()),
            ),
            next_step="look at whether an abort reaches a request whose client is gone",
            also=("K03", "K08") if zombie else ("K07", "K23"),
        )
    ]
