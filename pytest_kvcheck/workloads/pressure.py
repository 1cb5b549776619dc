"""Rows, pool and time under pressure: what is held must let others go on, and must not grow."""

from __future__ import annotations

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.workloads.base import (
    Numbers,
    Workload,
    WorkloadContext,
    at_once,
    features_seen,
    longest,
    room,
    server_sessions,
    share,
)

APPEND = 16
# Above it, filling the pool would take longer than it is worth.
GREATEST_PINNED = 16384
# Prompts of evict-return that nobody asks for until they are the longest unused.
LEFT_ALONE = 3


def _row_starvation(context: WorkloadContext) -> Plan:
    """As many idle sessions as the server has rows; then a second turn of every one: each owns its row."""
    plan = context.builder("row-starvation")
    names = [f"s{at}" for at in range(context.cell.features.max_running)]
    for name in names:
        plan.open(name)
    for turn in range(1 + context.rounds):
        for name in names:
            plan.turn(name, APPEND, 4, label=f"{name} turn {turn + 1}", deadline=60.0)
        plan.fence()
    plan.close(names[0])
    plan.fence()
    plan.generate(APPEND, 4, label="in the row that was given back", deadline=60.0)
    plan.fence()
    for name in names[1:]:
        plan.close(name)
    return context.plan(plan, "cached_turn")


def _pinned_pool(context: WorkloadContext) -> Plan:
    """Idle sessions hold most of the pool; a request that needs more must go on once they close."""
    plan = context.builder("pinned-pool")
    pool = context.cell.features.pool_tokens or 0
    count, size = _pins(context.cell)
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
            plan.turn(name, size, 4, label=f"{name} fills")
        plan.fence()
        given_up = plan.generate(int(pool * 0.3), 8, expect="either", label="waits for room, aborted")
        plan.abort(given_up, when_tokens=0)
        plan.fence()
        waiting = plan.generate(int(pool * 0.3), 8, label="waits for room")
        for name in names:
            plan.close(name, target=waiting)
        plan.fence()
        plan.generate(APPEND, 4, label="after the closes")
        plan.fence()
    return context.plan(plan)


def _pins(cell: Cell) -> tuple[int, int]:
    """How many sessions of how many prompt tokens fill 80 % of the pool, partly filled pages included."""
    pool, page = cell.features.pool_tokens or 0, cell.features.page_size
    most = longest(cell) - 16
    count = max(2, -(-int(pool * 0.8) // most))
    return count, int(pool * 0.8) // count // page * page - 8


def _pinned_applies(cell: Cell, params: Numbers) -> str | None:
    pool = cell.features.pool_tokens
    if pool is None or pool > GREATEST_PINNED:
        return f"needs pool_tokens <= {GREATEST_PINNED}, the cell has {pool or 'as many as fit'}"
    if int(pool * 0.3) + 8 > longest(cell):
        return f"needs context_length of 0.3 pools, the cell has {cell.features.context_length}"
    count, size = _pins(cell)
    if size < 8 or count + 1 > cell.features.max_running:
        return f"needs max_running > {count} and a pool of many pages"
    return server_sessions(cell)


def _evict_return(context: WorkloadContext) -> Plan:
    """More prompts than the pool holds, so that some are evicted; early ones come again, whole and in part.

    Long prompts and short ones in turn: of long ones a sliding window keeps only the ends. A session lives
    through it: what it holds must not be evicted.
    """
    plan = context.builder("evict-return")
    pool = context.cell.features.pool_tokens or 0
    plan.open("s0")
    plan.turn("s0", context.opening(APPEND), 4, logprobs="output", label="turn before")
    plan.fence()
    for round_ in range(context.rounds):
        here = f"round {round_ + 1}"
        size = _fill(context.cell, parts=12 if round_ % 2 == 0 else 120)
        prompts = [plan.ids(size) for _ in range(-(-pool * 3 // (2 * size)))]
        every = max(2, len(prompts) // 9)
        for at, prompt in enumerate(prompts):
            plan.generate(prompt, 4, label=f"{here} fills {at}")
            if at % every == every - 1 and at > LEFT_ALONE:
                old = prompts[plan.between(LEFT_ALONE, at - 1)]
                plan.generate(old, 4, logprobs="output", label=f"{here} again {at}")
                part = old[: plan.between(1, size)] + plan.ids(3)
                plan.generate(part, 4, logprobs="output", label=f"{here} part {at}")
            if at % 4 == 3:
                plan.fence()
        plan.fence()
        for at in range(LEFT_ALONE):
            plan.generate(prompts[at], 4, logprobs="output", label=f"{here} evicted {at}")
        plan.fence()
        plan.turn("s0", APPEND, 4, logprobs="output", label=f"turn after round {round_ + 1}")
        plan.fence()
    plan.close("s0")
    return context.plan(plan, "evicted_prefix", "cached_prefix")


def _fill(cell: Cell, parts: int) -> int:
    """Tokens of one prompt: so small a part of the pool and a ragged end, or what has room."""
    pool, page = cell.features.pool_tokens or 0, cell.features.page_size
    return min(max(pool // parts, page) // page * page + 3, share(cell, 6) - 8)


def _evict_applies(cell: Cell, params: Numbers) -> str | None:
    pool = cell.features.pool_tokens
    if pool is None or pool > GREATEST_PINNED:
        return f"needs pool_tokens <= {GREATEST_PINNED}, the cell has {pool or 'as many as fit'}"
    if not cell.features.prefix_cache:
        return "needs the prefix cache"
    return room(cell, 6, max(2 * cell.features.page_size, APPEND * (1 + int(params["rounds"]))))


def _soak(context: WorkloadContext) -> Plan:
    """Equal batches, to the token. Between them the server rests, and what it holds must not have grown."""
    plan = context.builder("soak-baseline")
    count, others, new = context.number("sessions"), context.number("plain"), context.number("max_new_tokens")
    turns = [[plan.ids(APPEND) for _ in range(3)] for _ in range(count)]
    plains = [plan.ids(2 * APPEND + at) for at in range(others)]
    for batch in range(context.rounds):
        here = f"batch {batch + 1}"
        names = [f"b{batch}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        plan.fence()
        for turn in range(3):
            for name, prompts in zip(names, turns, strict=True):
                plan.turn(name, prompts[turn], new, label=f"{here} {name} turn {turn + 1}")
            for at, prompt in enumerate(plains):
                plan.generate(prompt, new, label=f"{here} plain {at}")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
        plan.wait(1.0, label=f"{here} closed")
        plan.fence()
        # Some engines move their gauges only with a batch.
        plan.generate(plains[0][:4], 2, label=f"{here} refresh")
        plan.fence()
        plan.wait(0.5, label=f"{here} at rest")
        plan.fence(label=f"{here} over")
    seen = features_seen(context, together=count + others, decode=new, prompt=2 * APPEND)
    return context.plan(plan, "cached_turn", *seen)


def _cancel_burst(context: WorkloadContext) -> Plan:
    """A burst of requests on one prefix is cancelled token by token, beside canaries that must not notice."""
    plan = context.builder("cancel-burst")
    victims, canaries = context.number("victims"), context.number("canaries")
    together = at_once(context.cell, victims + canaries)
    size = min(128, share(context.cell, together) - context.number("max_new_tokens") - 8)
    answers = [plan.ids(40) for _ in range(canaries)]
    for round_ in range(context.rounds):
        prefix = plan.ids(size)
        for at in range(canaries):
            plan.generate(answers[at], 24, logprobs="output", label=f"canary {at}")
        for at in range(victims):
            prompt = prefix + plan.ids(8)
            new = context.number("max_new_tokens")
            victim = plan.generate(prompt, new, expect="either", label=f"victim {at}")
            if at % 3 == 2:
                plan.disconnect(victim, when_tokens=1 + (round_ + at) % 4)
            else:
                plan.abort(victim, when_tokens=(round_ + at) % 5)
        plan.fence()
        for at in range(canaries):
            plan.generate(answers[at], 24, logprobs="output", label=f"canary {at} after the burst")
        plan.generate(prefix + plan.ids(8), 8, logprobs="output", label="on the prefix of the cancelled")
        plan.fence()
    return context.plan(plan, "abort_mid_decode", "disconnect")


def _row_applies(cell: Cell, params: Numbers) -> str | None:
    return server_sessions(cell) or room(cell, cell.features.max_running, (1 + int(params["rounds"])) * 20)


PRESSURE = (
    Workload(
        "row-starvation",
        "As many idle sessions as rows, then a further turn of every one.",
        _row_starvation,
        {"rounds": 2},
        _row_applies,
    ),
    Workload(
        "pinned-pool",
        "Idle sessions hold most of the pool; a request that needs more goes on once they close.",
        _pinned_pool,
        {"rounds": 2},
        _pinned_applies,
    ),
    Workload(
        "evict-return",
        "More prompts than the pool holds, beside a session; evicted ones come again, whole and in part.",
        _evict_return,
        {"rounds": 2},
        _evict_applies,
    ),
    Workload(
        "soak-baseline",
        "Equal batches with rests between them: what is held must not grow.",
        _soak,
        {"sessions": 4, "plain": 4, "rounds": 6, "max_new_tokens": 8},
        lambda cell, params: room(
            cell,
            int(params["sessions"]) + int(params["plain"]),
            max(3 * (APPEND + int(params["max_new_tokens"])), 2 * APPEND + int(params["plain"])),
        ),
    ),
    Workload(
        "cancel-burst",
        "A burst on one prefix is cancelled token by token, beside canaries.",
        _cancel_burst,
        {"victims": 9, "canaries": 3, "rounds": 3, "max_new_tokens": 96},
        lambda cell, params: room(
            cell,
            at_once(cell, int(params["victims"]) + int(params["canaries"])),
            int(params["max_new_tokens"]) + 24,
        ),
    ),
)
