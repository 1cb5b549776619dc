"""Protocol: replies are whole and honest, what must be refused is refused, an abort is called an abort."""

from __future__ import annotations

import re

from pytest_kvcheck.findings import Finding, Status, some
from pytest_kvcheck.operations import OVERLAP
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import NO_KIND, asked_to_stop, ids_of, name_of, names, starved
from pytest_kvcheck.trace import FINISHED, OpRecord

NAME = "protocol"
ABOUT_LOGPROBS = re.compile(r"log-?prob|NaN", re.I)
# What the client did not send, or could not: the cause stands elsewhere.
NOT_ASKED = re.compile(r"not sent:|interrupted|server died")
# An abort that the target outlives by this many tokens and seconds was not heard. Where several targets run to
# their very end and none was ever stopped, a shorter time is enough: no race is lost every time.
DEAF_TOKENS, DEAF_SECONDS, ALL_DEAF_SECONDS = 64, 10.0, 0.5


def judge_protocol(facts: CaseFacts) -> list[Finding]:
    """One finding a kind and sentence. What broke off because the server died is ``engine_log``'s."""
    stopped = asked_to_stop(facts)
    groups: dict[tuple[str, str], list[tuple[OpRecord, str]]] = {}
    for record in facts.records:
        for kind, sort, text in _judge(facts, record, stopped):
            groups.setdefault((kind, sort), []).append((record, text))
    if ("K03", "deaf") not in groups and (deaf := _never_heard(facts)):
        groups["K03", "deaf"] = deaf
    return [_finding(kind, sort, group) for (kind, sort), group in groups.items()]


def _judge(facts: CaseFacts, record: OpRecord, stopped: set[int]) -> list[tuple[str, str, str]]:
    """(kind, sort, sentence) of each violation of one operation."""
    op, reply = record.op, record.reply
    found = []
    if facts.server.alive or reply.finish in FINISHED:
        for fault in reply.faults:
            found.append(("K18" if ABOUT_LOGPROBS.search(fault) else "K19", "fault", fault))
    if op.kind == "open" and facts.server.alive and reply.http_status is not None and reply.http_status >= 400:
        text = f"the session was not opened: HTTP {reply.http_status} {reply.message[:200]}"
        found.append(("K09", "open", text))
    if not op.generates or record.phase not in ("workload", "probe"):
        return found
    if (
        reply.finish == "error"
        and not reply.faults
        and facts.server.alive
        and not NOT_ASKED.match(reply.message)
    ):
        what = f"HTTP {reply.http_status}" if reply.http_status else "no answer"
        sort = "5xx" if (reply.http_status or 0) >= 500 else "error"
        found.append((NO_KIND if sort == "5xx" else "K19", sort, f"{what}: {reply.message[:200]}"))
    if op.expect == "reject" and reply.finish in FINISHED and not _came_late(facts, record):
        text = f"the server ran a request that it must refuse ({len(op.input_ids)} new tokens"
        text += f", invalid {op.invalid})" if op.invalid else f", context {facts.cell.features.context_length})"
        if op.invalid == OVERLAP:
            text = "the server ran a second turn of a session while the first one ran: both write to its KV"
            found.append(("K07", "overlap", text))
        else:
            found.append(("K19", "accepted", text))
    if op.expect == "finish" and op.id not in stopped and reply.finish in ("abort", "rejected"):
        found += _unasked(facts, record)
    if op.expect in ("abort", "either") and reply.finish in FINISHED:
        found += _unheard(facts, record)
    return found


def _unasked(facts: CaseFacts, record: OpRecord) -> list[tuple[str, str, str]]:
    """A request that should have finished and that the server ended, though nobody asked it to."""
    if record.op.session is not None and "active request" in record.reply.message:
        return []  # judged with the session's other turns (K07)
    how = "aborted" if record.reply.finish == "abort" else "refused"
    text = (
        f"{how} by the server although nothing asked for it: {record.reply.message[:200] or 'no reason given'}"
    )
    return [("K19", how, text)]


def _came_late(facts: CaseFacts, record: OpRecord) -> bool:
    """Whether a turn that was to run into another one of its session may have met it ended."""
    if record.op.invalid != OVERLAP:
        return False
    other = next((each for each in facts.records if each.op.id == record.op.target), None)
    # A client that lags reads two answers in any order.
    return other is None or record.shown_at_action is None or record.ended >= other.ended - record.client_lag


def _actions(facts: CaseFacts, record: OpRecord) -> list[OpRecord]:
    """The aborts that were sent while this request ran, the first first."""
    return [
        r
        for r in facts.records
        if r.op.kind == "abort" and r.op.target == record.op.id and r.shown_at_action is not None
    ]


def _never_heard(facts: CaseFacts) -> list[tuple[OpRecord, str]]:
    """Two or more requests that were aborted early and went on to their full length, where no abort of the
    whole case stopped anything.
    """
    targets = {r.op.target for r in facts.of_phase("workload") if r.op.kind == "abort"}
    aborted = [r for r in facts.of_phase("workload") if r.op.id in targets]
    if starved(facts) or any(r.reply.finish == "abort" for r in aborted):
        return []
    deaf = []
    for record in aborted:
        actions, shown = _actions(facts, record), len(record.reply.output_ids)
        if not actions or record.reply.finish != "length" or shown < record.op.max_new_tokens:
            continue
        ran_on = shown - (actions[0].shown_at_action or 0)
        if ran_on > DEAF_TOKENS and record.ended - actions[0].ended > ALL_DEAF_SECONDS:
            deaf.append(
                (record, f"ran on for {some(ran_on, 'token')} after it was aborted, to its full length")
            )
    return deaf if len(deaf) > 1 else []


def _unheard(facts: CaseFacts, record: OpRecord) -> list[tuple[str, str, str]]:
    """A finish that was to be an abort: a race with the end is legal, running on for long is not."""
    actions = _actions(facts, record)
    if not actions or starved(facts):
        return []
    ran_on = len(record.reply.output_ids) - (actions[0].shown_at_action or 0)
    if ran_on > DEAF_TOKENS and record.ended - actions[0].ended > DEAF_SECONDS:
        return [
            (
                "K03",
                "deaf",
                f"ran on for {some(ran_on, 'token')} after it was aborted, and says {record.reply.finish}",
            )
        ]
    asked = record.op.max_new_tokens
    if record.reply.finish == "length" and len(record.reply.output_ids) < asked:
        text = f"was aborted after {len(record.reply.output_ids)} of {asked} tokens, and says length"
        return [("K19", "called length", text)]
    return []


def _finding(kind: str, sort: str, group: list[tuple[OpRecord, str]]) -> Finding:
    record, text = group[0]
    status: Status = "crash" if sort == "5xx" else "mismatch"
    also = {
        "deaf": ("K04",),
        "called length": ("K03",),
        "aborted": ("K03", "K08"),
        "refused": ("K07", "K09"),
        "overlap": ("K13", "K06"),
    }
    evidence = [f"Request {record.rid}, trace operation {record.op.id}, HTTP {record.reply.http_status}."]
    if len(group) > 1:
        evidence.append(f"{len(group)} such replies: {names([other for other, _ in group])}.")
    return Finding(
        kind=kind,
        oracle=NAME,
        status=status,
        headline=f"{name_of(record)}: {text}",
        owner=name_of(record),
        operations=ids_of(other for other, _ in group),
        evidence=tuple(evidence),
        next_step="find the request in the trace and the server's log at that time",
        also=also.get(sort, ()),
    )
