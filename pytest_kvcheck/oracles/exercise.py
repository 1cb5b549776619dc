"""Exercise: proof that a case did what its name says. What was not seen was not tested."""

from __future__ import annotations

from collections.abc import Callable

from pytest_kvcheck.findings import Finding
from pytest_kvcheck.observe.logs import LogEvent, of_meaning
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import (
    NO_KIND,
    closed_in_flight,
    overlapping,
    requests,
    timed_out_sessions,
)
from pytest_kvcheck.oracles.pairs import pair_counts
from pytest_kvcheck.trace import FINISHED, OpRecord

NAME = "exercise"


def judge_exercise(facts: CaseFacts) -> list[Finding]:
    """Counts every thing that can be exercised into ``facts.exercised``; a finding for what is missing."""
    facts.exercised.update({name: count(facts) for name, (count, _) in COUNTERS.items()})
    facts.exercised.update(pair_counts(facts))
    unknown = [name for name in facts.plan.must_exercise if name not in COUNTERS]
    missing = [n for n in facts.plan.must_exercise if n in COUNTERS and not facts.exercised[n]]
    excused = {name: facts.promises.lacks[name] for name in missing if name in facts.promises.lacks}
    missing = [name for name in missing if name not in excused]
    found = []
    if unknown:
        found.append(
            Finding(
                kind=NO_KIND,
                oracle=NAME,
                status="inconclusive",
                headline=f"nothing counts {', '.join(unknown)}, which the plan must exercise",
                next_step=f"use one of: {', '.join(COUNTERS)}",
            )
        )
    if missing and facts.cell.exercise == "required" and facts.server.alive:
        found.append(
            Finding(
                kind=NO_KIND,
                oracle=NAME,
                status="unexercised",
                headline=f"the case never exercised {', '.join(missing)}: it proved nothing about it",
                evidence=(
                    "Seen: "
                    + (", ".join(f"{n} {c}" for n, c in facts.exercised.items() if c) or "nothing")
                    + ".",
                ),
                next_step="; ".join(f"{name}: {COUNTERS[name][1]}" for name in missing)
                + "; or say `exercise: optional` in the cell",
            )
        )
    return found


def _asked(facts: CaseFacts) -> list[OpRecord]:
    return requests(facts.of_phase("workload"))


def _retract(facts: CaseFacts) -> int:
    """The greatest of three counts of the same thing: replies, log lines, the server's counter."""
    replies = sum(record.reply.retractions or 0 for record in _asked(facts))
    lines = sum(_count(event) for event in of_meaning(facts.log, "retract"))
    totals = [s.retracted_total for s in (facts.baseline, *facts.samples, facts.idle) if s is not None]
    known = [total for total in totals if total is not None]
    return max(replies, lines, max(known, default=0) - min(known, default=0))


def _count(event: LogEvent) -> int:
    value = event.fields.get("count", 1)
    return value if isinstance(value, int) else 1


def _chunks(facts: CaseFacts) -> list[OpRecord]:
    """Requests whose prompt, less what came from the cache, is longer than a chunk."""
    chunk = facts.cell.features.chunked_prefill
    return [
        record
        for record in _asked(facts)
        if chunk
        and record.reply.finish in (*FINISHED, "abort", "disconnected")
        and (record.reply.prompt_tokens or record.history + len(record.op.input_ids))
        - (record.reply.cached_tokens if record.reply.cached_tokens is not None else record.history)
        > chunk
    ]


def _mixed(facts: CaseFacts) -> int:
    """Prefills that ran while another request was decoding, in a cell that mixes both in one batch."""
    if not facts.cell.features.mixed_chunk:
        return 0
    asked = _asked(facts)
    return sum(
        any(
            other.first_token is not None
            and other.first_token < (record.first_token or record.ended)
            and other.ended > record.started
            for other in asked
            if other is not record
        )
        for record in asked
    )


def _stopped(facts: CaseFacts, kind: str, shown: Callable[[OpRecord, OpRecord], bool]) -> int:
    targets = {record.op.id: record for record in _asked(facts)}
    # Where an engine has no abort call, the client aborts by leaving.
    ended = ("disconnected", "abort")
    count = 0
    for action in facts.of_phase("workload"):
        if action.op.kind != kind:
            continue
        if action.op.target is not None:
            hit = [targets[action.op.target]] if action.op.target in targets else []
        else:
            hit = overlapping(action, targets.values())
        count += sum(target.reply.finish in ended and shown(action, target) for target in hit)
    return count


def _decoding(action: OpRecord, target: OpRecord) -> bool:
    return bool(action.shown_at_action) or (
        target.first_token is not None and target.first_token <= action.ended
    )


def _rejected(facts: CaseFacts) -> int:
    return sum(
        r.reply.finish == "rejected" or (r.op.expect == "reject" and r.reply.finish == "abort")
        for r in _asked(facts)
    )


def _speculation(facts: CaseFacts) -> int:
    """Requests that took fewer verify steps than tokens: at least one draft was accepted."""
    return sum(
        bool(r.reply.spec_verify_steps) and len(r.reply.output_ids) > (r.reply.spec_verify_steps or 0)
        for r in _asked(facts)
    )


def _evicted(facts: CaseFacts) -> int:
    """Requests that begin with a whole prompt of before, and found less of it than a page short of all."""
    page = facts.cell.features.page_size
    done: dict[tuple[int, ...], float] = {}
    count = 0
    for record in sorted(_asked(facts), key=lambda record: record.started_seq):
        if record.op.kind != "generate" or record.reply.finish not in FINISHED:
            continue
        ids, cached = record.op.input_ids, record.reply.cached_tokens
        ended = done.get(ids)
        if ended is not None and ended < record.started and cached is not None:
            count += cached < (len(ids) - 1) // page * page
        done.setdefault(ids, record.ended)
    return count


# What can be exercised: how it is counted, and how to reach it.
COUNTERS: dict[str, tuple[Callable[[CaseFacts], int], str]] = {
    "retract": (_retract, "run at least two requests at once for longer than the retract interval"),
    "chunked_prefill": (
        lambda facts: len(_chunks(facts)),
        "send prompts longer than the cell's chunked_prefill",
    ),
    "mixed_chunk": (_mixed, "set mixed_chunk, and send a prompt while another request decodes"),
    "abort_mid_decode": (
        lambda facts: _stopped(facts, "abort", _decoding),
        "ask for more tokens, so that the abort comes before the request's end",
    ),
    "abort_queued": (
        lambda facts: _stopped(facts, "abort", lambda action, target: not _decoding(action, target)),
        "fill every row first, so that the aborted request still waits",
    ),
    "reject": (_rejected, "send a turn that the server must refuse (over-length, or with an offset)"),
    "disconnect": (
        lambda facts: _stopped(facts, "disconnect", lambda action, target: True),
        "ask for more tokens, so that the socket closes before the request's end",
    ),
    "session_timeout": (lambda facts: len(timed_out_sessions(facts)), "wait longer than the session's timeout"),
    "close_in_flight": (
        lambda facts: len(closed_in_flight(facts)),
        "close the session before its turn has ended",
    ),
    "cached_turn": (
        lambda facts: sum(r.op.kind == "turn" and bool(r.reply.cached_tokens) for r in _asked(facts)),
        "give a session at least two turns, the first longer than a page",
    ),
    "cached_prefix": (
        lambda facts: sum(r.op.kind == "generate" and bool(r.reply.cached_tokens) for r in _asked(facts)),
        "send the same prompt twice, longer than a page",
    ),
    "evicted_prefix": (_evicted, "send more prompts than the pool holds, and the first of them again"),
    "stopped": (
        lambda facts: sum(r.reply.finish == "stop" and bool(r.op.stop_ids) for r in _asked(facts)),
        "give stop ids that the model samples before the request's length",
    ),
    "parallel_samples": (
        lambda facts: sum(bool(r.reply.samples) for r in _asked(facts)),
        "ask for several samples of a plain request that is not streamed",
    ),
    "speculation": (_speculation, "use a draft model whose guesses are accepted sometimes"),
    "concurrency": (
        lambda facts: max((len(overlapping(r, _asked(facts))) for r in _asked(facts)), default=0),
        "send requests without waiting for each other",
    ),
}
