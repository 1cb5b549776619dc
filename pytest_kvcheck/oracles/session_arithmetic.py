"""Session arithmetic: every count that a reply names is exact against the client's own ledger.

``prompt_tokens`` is history plus new tokens; ``cached_tokens`` lies in the range that the engine promises;
``completion_tokens`` is what came. Many turns that are wrong in one way are one finding with the first of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_kvcheck.findings import Finding, Status, some
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import asked_to_stop, ids_of, name_of, names, requests, turns_of
from pytest_kvcheck.trace import FINISHED, OpRecord

NAME = "session_arithmetic"
# A refusal because the session's last turn is not over yet; a short window of it after an abort is normal.
BUSY_SESSION = re.compile(r"active request|in[- ]flight|still running|session is busy", re.I)
BUSY_GRACE = 10.0
# A length that is wrong by at most this many tokens is an accounting slip, by more a lost prefix.
SLIP = 8


@dataclass(frozen=True, slots=True)
class Wrong:
    """One count that does not fit; ``lost`` in tokens where it says so."""

    record: OpRecord
    kind: str
    text: str
    also: tuple[str, ...] = ()
    status: Status = "mismatch"
    next_step: str = "look at what counts and trims the tokens of a request that finishes"
    tokens: int | None = None


def judge_session_arithmetic(facts: CaseFacts) -> list[Finding]:
    """One finding a kind, with the number of replies that it concerns."""
    wrong = [one for turns in turns_of(facts).values() for one in _judge_session(facts, turns)]
    wrong += [one for r in requests(facts.of_phase("workload", "probe")) for one in _judge_reply(facts, r)]
    by_kind: dict[tuple[str, Status], list[Wrong]] = {}
    for one in sorted(wrong, key=lambda one: one.record.ended_seq):
        by_kind.setdefault((one.kind, one.status), []).append(one)
    return [_finding(group) for group in by_kind.values()]


def _finding(group: list[Wrong]) -> Finding:
    first = group[0]
    evidence = [f"Request {first.record.rid}, trace operation {first.record.op.id}."]
    if len(group) > 1:
        evidence.append(f"{len(group)} such replies: {names([one.record for one in group])}.")
    return Finding(
        kind=first.kind,
        oracle=NAME,
        status=first.status,
        headline=f"{name_of(first.record)}: {first.text}",
        tokens=first.tokens,
        owner=name_of(first.record),
        operations=ids_of(one.record for one in group),
        evidence=tuple(evidence),
        next_step=first.next_step,
        also=first.also,
    )


# --- one session ---------------------------------------------------------------------------------------
def _judge_session(facts: CaseFacts, turns: list[OpRecord]) -> list[Wrong]:
    """Walks a session's turns in the order in which they were sent.

    ``undone`` are the turns since the last finished one that did not finish; ``legal`` are the lengths that the
    server may rightly hold beside the client's ledger: it may have finished a turn whose socket was closed.
    """
    wrong: list[Wrong] = []
    undone: list[OpRecord] = []
    legal = {0}
    for turn in turns:
        reply = turn.reply
        if reply.finish not in FINISHED:
            wrong += _refused(facts, turn, turns)
            if reply.finish in ("disconnected", "timeout"):
                most = turn.op.max_new_tokens
                outputs = range(1, most + 1) if turn.op.stop_ids else (most,)
                legal |= {length + len(turn.op.input_ids) + out for length in legal for out in outputs}
            undone.append(turn)
            continue
        if reply.prompt_tokens is not None:
            expected = turn.history + len(turn.op.input_ids)
            surplus = reply.prompt_tokens - expected
            if surplus not in legal:
                wrong.append(_prompt(turn, expected, surplus, undone))
                # What follows inherits the error and would only repeat it.
                return wrong
            legal = {surplus}
            if surplus == 0:
                wrong += _cached(facts, turn, undone)
        undone = []
    return wrong


def _prompt(turn: OpRecord, expected: int, surplus: int, undone: list[OpRecord]) -> Wrong:
    found = f"prompt_tokens is {expected + surplus}, expected {expected} (history {turn.history})"
    if undone:
        last = undone[-1]
        partial = len(last.op.input_ids) + len(last.reply.output_ids)
        how = "kept it as history" if surplus > 0 else "lost history with it"
        text = f"{found}: after {name_of(last)} ended as {last.reply.finish} the session {how}"
        if surplus in (partial, partial - 1, partial + 1):
            text += f" ({some(partial, 'token')} sent and shown)"
        also: tuple[str, ...] = ("K04",) if last.reply.finish == "disconnected" else ("K03",)
        also += ("K05",) if last.reply.retractions else ()
        step = "look at what the end of a turn that did not finish writes into its session"
        return Wrong(turn, "K06", text, also, next_step=step, tokens=abs(surplus))
    text = (
        f"{found}: {abs(surplus)} too {'many' if surplus > 0 else 'few'} though every turn before it finished"
    )
    step = "look at the length that a finished turn saves for the next one"
    return Wrong(turn, "K02", text, ("K06", "K05") if turn.reply.retractions else ("K06",), next_step=step)


def _cached(facts: CaseFacts, turn: OpRecord, undone: list[OpRecord]) -> list[Wrong]:
    cached, prompt = turn.reply.cached_tokens, turn.reply.prompt_tokens
    if cached is None or prompt is None or turn.history == 0:
        return []
    low, high = facts.promises.expected_cached(turn.history, prompt)
    expected = (
        f"expected {low}"
        + (f" to {high}" if high != low else "")
        + f" of {some(turn.history, 'token')} of history"
    )
    # A retracted turn counts again what it computed itself; a turn that did not finish may have left its prompt
    # in the prefix cache.
    high = high if not (turn.reply.retractions or undone) else prompt
    if turn.reply.retractions:
        high += len(turn.reply.output_ids)
    if cached > high:
        text = f"cached_tokens is {cached}, {expected}: {some(cached - high, 'token')} too many"
        step = "look at the length that the session hands to its next turn, and at what reports it"
        return [Wrong(turn, "K19", text, ("K02",), next_step=step, tokens=cached - high)]
    if cached >= _least(facts, turn, undone, low):
        return []
    short = low - cached
    text = f"cached_tokens is {cached}, {expected}"
    step = "look at the length that a finished turn saves for the next one"
    if 0 < short <= SLIP and cached > 0:
        return [Wrong(turn, "K02", f"{text}: {short} too few", ("K25", "K19"), next_step=step, tokens=short)]
    also = ("K03",) if undone else ("K02",)
    text += ": the session's KV was lost without a word and computed again"
    return [Wrong(turn, "K25", text, also, next_step="look at what dropped the session's KV", tokens=short)]


def _least(facts: CaseFacts, turn: OpRecord, undone: list[OpRecord], low: int) -> int:
    """The least number of cached tokens that is legal here: everything but a plain turn relaxes it."""
    if turn.reply.retractions or _pressure(facts) or _flushed_before(facts, turn):
        return 0
    # A retraction gives back what the turn held. What is missing of it afterwards is computed again by the next
    # turn (SGLang 0.5.23: 12 tokens after 13 retractions, 3 after 2, 8 after 4); log-probs judge it.
    before = [r for r in turns_of(facts).get(str(turn.op.session), []) if r.ended_seq < turn.started_seq]
    for earlier in reversed(before):
        if earlier.reply.finish in FINISHED and not earlier.reply.retractions:
            break
        if earlier.reply.retractions:
            low = min(low, max(0, earlier.history - 1))
    if not undone:
        return low
    # A turn that the server refused has not run, so the session's KV must be there; one that was stopped while
    # it ran may have dropped it.
    return min(low, 1) if all(record.reply.finish == "rejected" for record in undone) else 0


def _flushed_before(facts: CaseFacts, turn: OpRecord) -> bool:
    return any(r.op.kind == "flush" and r.started < turn.ended for r in facts.of_phase("workload"))


def _pressure(facts: CaseFacts) -> bool:
    """Whether the pool may have been so full that cached prefixes had to go.

    The KV of an open streaming session is its own; a history that is sent again lives in the prefix cache and
    may go as soon as all that was ever asked for does not fit.
    """
    for sample in facts.samples:
        for gauge in sample.pools:
            if gauge.available is not None and gauge.total and gauge.available < gauge.total // 10:
                short = (gauge.evictable or 0) + gauge.available < gauge.total // 10
                if short or not facts.promises.streaming_sessions:
                    return True
    if facts.promises.streaming_sessions:
        return False
    page = facts.cell.features.page_size
    gauges = facts.idle.pools if facts.idle is not None else []
    total = min([gauge.total for gauge in gauges if gauge.total] or [facts.cell.features.pool_tokens or 0])
    asked = sum(
        -(-(r.history + len(r.op.input_ids) + r.op.max_new_tokens) // page) * page * r.op.samples
        for r in requests(facts.of_phase("workload"))
    )
    return 0 < total < asked / 0.9


def _refused(facts: CaseFacts, turn: OpRecord, turns: list[OpRecord]) -> list[Wrong]:
    """A turn that was refused because the session is said to have a request in flight when it has none."""
    reply = turn.reply
    if reply.finish not in ("rejected", "abort") or not BUSY_SESSION.search(reply.message):
        return []
    if any(other is not turn and other.started < turn.started < other.ended for other in turns):
        return []  # the client did send two at once
    if any(other.started > turn.ended and other.reply.finish in FINISHED for other in turns):
        return []  # it took a later one: a window, not a dead end
    ran = [r.ended for r in turns if r.started < turn.started and not BUSY_SESSION.search(r.reply.message)]
    since = max(ran, default=0.0)
    rested = any(
        s.t > since and s.t < turn.started and s.running == 0 and s.waiting == 0 for s in facts.samples
    )
    if not rested and turn.started - since < BUSY_GRACE:
        return []
    text = f"refused ({reply.message[:120]!r}) though no turn of this session is in flight"
    step = "look at what clears the session's in-flight mark when a turn is aborted while it waits"
    return [Wrong(turn, "K07", text, ("K06", "K03"), status="stuck", next_step=step)]


# --- one reply -----------------------------------------------------------------------------------------
def _judge_reply(facts: CaseFacts, record: OpRecord) -> list[Wrong]:
    reply, op = record.reply, record.op
    if reply.faults or reply.finish not in FINISHED:
        return []
    wrong = []
    out = len(reply.output_ids)
    prompt = reply.prompt_tokens
    if op.kind != "turn" and prompt is not None and prompt != len(op.input_ids):
        wrong.append(Wrong(record, "K19", f"prompt_tokens is {prompt}, {len(op.input_ids)} ids were sent"))
    if reply.completion_tokens is not None and reply.completion_tokens != out:
        wrong.append(
            Wrong(record, "K19", f"completion_tokens is {reply.completion_tokens}, {out} ids came", ("K02",))
        )
    room = facts.cell.features.context_length - record.history - len(op.input_ids)
    # Near the end of the context a server may give fewer; it may also need a place for the token after.
    wanted = op.max_new_tokens
    early = (
        out < wanted and reply.finish == "length" and wanted + 2 <= room and op.id not in asked_to_stop(facts)
    )
    if op.kind != "score" and (out > wanted or early):
        text = f"finished as {reply.finish} with {some(out, 'token')}, {wanted} were asked for"
        wrong.append(Wrong(record, "K19", text, ("K02",)))
    for each in (reply, *reply.samples):
        past = [at for at, token in enumerate(each.output_ids[:-1], start=1) if token in op.stop_ids]
        if past:
            text = f"went on for {some(len(each.output_ids) - past[0], 'token')} past its stop id "
            text += f"{each.output_ids[past[0] - 1]}, and finished as {each.finish}"
            wrong.append(Wrong(record, "K19", text, ("K02",)))
    cached = reply.cached_tokens
    if cached is not None and prompt is not None and cached > prompt + (out if reply.retractions else 0):
        wrong.append(Wrong(record, "K19", f"cached_tokens is {cached} of a prompt of {prompt}", ("K02",)))
    return wrong
