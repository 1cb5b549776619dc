"""Turns that are aborted or rejected, and the turn after them: the session must be as if they never were."""

from __future__ import annotations

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import OVERLAP, Plan
from pytest_kvcheck.workloads.base import (
    Numbers,
    Workload,
    WorkloadContext,
    longest,
    room,
    rows,
    server_sessions,
    share,
)

APPEND = 24


def _nth_mid_abort(context: WorkloadContext) -> Plan:
    return _mid_abort(context, "nth-mid-abort", before=context.number("turns_before"))


def _first_mid_abort(context: WorkloadContext) -> Plan:
    return _mid_abort(context, "first-mid-abort", before=0)


def _mid_abort(context: WorkloadContext, workload: str, before: int) -> Plan:
    """Each round: some finished turns, one aborted when it has shown n tokens, two that must follow on from
    the last finished one. Sessions of a round run side by side and are aborted at different n.
    """
    plan = context.builder(workload)
    count, new = context.number("sessions"), context.number("max_new_tokens")
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        for turn in range(before):
            for name in names:
                size = context.opening(APPEND) if turn == 0 else APPEND
                plan.turn(name, size, 8, label=f"{name} turn {turn + 1}")
        plan.fence()
        first = APPEND if before else context.opening(APPEND)
        for at, name in enumerate(names):
            target = plan.turn(name, first, new, expect="either", label=f"{name} aborted turn")
            plan.abort(target, when_tokens=1 + (round_ * count + at) % 6)
        plan.fence()
        for turn in range(2):
            for name in names:
                size = first if turn == 0 else APPEND
                plan.turn(name, size, 8, logprobs="output", label=f"{name} turn {turn + 1} after the abort")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan, "abort_mid_decode", "cached_turn")


def _pre_abort(context: WorkloadContext) -> Plan:
    """Each round: a finished turn, one that the engine must reject before it runs, one that must go on as if
    it had not been sent. Rejected for a parameter that sessions refuse, and for its length together with the
    history (by itself it would fit).
    """
    plan = context.builder("pre-abort")
    limit = context.cell.features.context_length
    for round_ in range(context.rounds):
        name = f"s{round_}"
        plan.open(name)
        plan.turn(name, context.opening(APPEND), 8, label=f"{name} turn 1")
        if context.sessions == "streaming":
            plan.turn(name, APPEND, 8, expect="reject", invalid="offset", label=f"{name} with an offset")
            plan.turn(name, APPEND, 8, label=f"{name} after the offset")
        plan.turn(name, limit - 8, 8, expect="reject", label=f"{name} over-length")
        plan.turn(name, APPEND, 8, label=f"{name} after the over-length")
        plan.close(name)
    return context.plan(plan, "reject", "cached_turn")


def _overlapping_turn(context: WorkloadContext) -> Plan:
    """While a turn of a session runs, further turns are sent to it. Each must be refused, for as long as the
    first runs: a refusal must not clear what says that the session is busy.
    """
    plan = context.builder("overlapping-turn")
    new, more = context.number("max_new_tokens"), context.number("overlaps")
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(context.number("sessions"))]
        for name in names:
            plan.open(name)
            plan.turn(name, context.opening(APPEND), 8, label=f"{name} turn 1")
        plan.fence()
        for name in names:
            running = plan.turn(name, APPEND, new, label=f"{name} long turn")
            for at in range(more):
                plan.turn(
                    name,
                    8,
                    4,
                    expect="reject",
                    invalid=OVERLAP,
                    label=f"{name} overlapping turn {at + 1}",
                    target=running,
                    when_tokens=1 + at * new // (2 * more),
                )
        plan.fence()
        for turn in range(2):
            for name in names:
                plan.turn(name, APPEND, 8, logprobs="output", label=f"{name} turn {turn + 1} after the refused")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan, "reject", "cached_turn")


def _queued_abort(context: WorkloadContext) -> Plan:
    """Turns and requests are aborted while they wait, and then repeated. They wait for a row, behind as many
    plain requests as there are rows; and for their turn to prefill, behind a prompt of many chunks.
    """
    plan = context.builder("queued-abort")
    count, fillers = context.number("sessions"), context.cell.features.max_running
    new = min(context.number("filler_tokens"), share(context.cell, fillers + count) - 8)
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        # Every other session has a past: its row is kept for it while it waits.
        for name in names[::2]:
            plan.turn(name, APPEND, 4, label=f"{name} turn 1")
        plan.fence()
        busy = [plan.generate(8, new, label=f"filler {at}") for at in range(fillers)]
        plan.hold(plan.running(filler) for filler in busy[: fillers - len(names[::2])])
        for name in names:
            target = plan.turn(name, APPEND, 8, expect="either", label=f"{name} waits for a row")
            plan.abort(target, when_tokens=0)
        plan.fence()
        if context.chunk is not None:
            size = min(7 * context.chunk, share(context.cell, 4) - 8)
            behind = plan.generate(size, 2, label="long prompt")
            fresh = f"r{round_}-fresh"
            plan.open(fresh)
            names.append(fresh)
            prompt = plan.ids(APPEND)
            # Neither has a row yet, so whichever is first in line may have one kept for it.
            queued = [
                plan.generate(prompt, 8, expect="either", label="plain waits to prefill", target=behind),
                plan.turn(fresh, APPEND, 8, expect="either", label=f"{fresh} waits to prefill", target=behind),
            ]
            for target in queued:
                plan.abort(target, when_tokens=0)
            plan.fence()
            plan.generate(prompt, 8, logprobs="output", label="plain after the abort")
        for turn in range(2):
            for name in names:
                plan.turn(name, APPEND, 8, logprobs="output", label=f"{name} turn {turn + 1} after the abort")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan, "abort_queued", "cached_turn")


def _prefill_abort(context: WorkloadContext) -> Plan:
    """A prompt of many chunks is aborted before it shows a token, beside a request that goes on decoding."""
    plan = context.builder("prefill-abort")
    chunk = context.chunk or 1
    size = min(share(context.cell, 3) - 128, context.number("chunks") * chunk)
    plan.generate(chunk + 5, 2, label="a prompt of two chunks")
    plan.fence()
    for round_ in range(context.rounds):
        name = f"s{round_}"
        plan.open(name)
        if round_ % 2:
            plan.turn(name, APPEND, 4, label=f"{name} turn 1")
        plan.fence()
        bystander = plan.generate(APPEND, 48, logprobs="output", label="bystander")
        plan.hold([plan.running(bystander)])
        target = plan.turn(name, size - round_ % 3, 4, expect="either", label=f"{name} long turn")
        plan.abort(target, when_tokens=0)
        plan.fence()
        plan.turn(name, APPEND, 8, logprobs="output", label=f"{name} after the abort")
        plan.turn(name, APPEND, 8, logprobs="output", label=f"{name} after that")
        plan.close(name)
        plan.fence()
    return context.plan(plan, "abort_queued", "chunked_prefill", "cached_turn")


def _prefill_abort_applies(cell: Cell, params: Numbers) -> str | None:
    chunk = cell.features.chunked_prefill
    if chunk is None:
        return "needs chunked_prefill"
    if 2 * chunk > longest(cell) - 128:
        return f"needs a context of more than two chunks of {chunk} tokens"
    return room(cell, 3, 2 * chunk + 128)


def _mid_abort_applies(cell: Cell, params: Numbers) -> str | None:
    history = int(params.get("turns_before", 0)) * (APPEND + 8) + 3 * (APPEND + 8)
    return room(cell, int(params["sessions"]), history + int(params["max_new_tokens"]))


ABORTS = (
    Workload(
        "nth-mid-abort",
        "A later turn is aborted when it has shown n tokens; the next goes on from the last finished one.",
        _nth_mid_abort,
        {"sessions": 2, "rounds": 3, "turns_before": 2, "max_new_tokens": 256},
        _mid_abort_applies,
    ),
    Workload(
        "first-mid-abort",
        "The first turn is aborted when it has shown n tokens; the session must be as new.",
        _first_mid_abort,
        {"sessions": 2, "rounds": 3, "max_new_tokens": 256},
        _mid_abort_applies,
    ),
    Workload(
        "pre-abort",
        "A turn that the engine must reject before it runs; the session's state stays intact.",
        _pre_abort,
        {"rounds": 3},
        lambda cell, params: room(cell, 1, 4 * (APPEND + 8)),
    ),
)
MORE_ABORTS = (
    Workload(
        "overlapping-turn",
        "Turns are sent to a session whose turn runs; every one must be refused, and none may be felt.",
        _overlapping_turn,
        {"sessions": 2, "rounds": 2, "overlaps": 3, "max_new_tokens": 96},
        lambda cell, params: (
            server_sessions(cell)
            or room(cell, int(params["sessions"]), 4 * (APPEND + 8) + int(params["max_new_tokens"]))
        ),
    ),
    Workload(
        "queued-abort",
        "Turns are aborted while they wait behind a full batch, and then repeated.",
        _queued_abort,
        # Whether an abort meets a request that has been given its row already is a matter of milliseconds.
        {"sessions": 2, "rounds": 4, "filler_tokens": 96},
        lambda cell, params: (
            rows(cell, int(params["sessions"]) + 1) or room(cell, cell.features.max_running, APPEND * 4 + 40)
        ),
    ),
    Workload(
        "prefill-abort",
        "A prompt of many chunks is aborted before its first token, beside a decoding request.",
        _prefill_abort,
        {"rounds": 4, "chunks": 7},
        _prefill_abort_applies,
    ),
)
