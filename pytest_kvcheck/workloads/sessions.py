"""Sessions that run to their ends: inheritance, log-probs, stress. Shapes are those of the upstream suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import LogprobMode, Plan
from pytest_kvcheck.workloads.base import (
    Applies,
    Numbers,
    Workload,
    WorkloadContext,
    features_seen,
    longest,
    room,
    share,
)

# New tokens of one turn of abort-leak-repro: sixteen such turns and the warm-up fit a context of 512.
APPEND = 18
MODES: tuple[LogprobMode, ...] = ("output", "input", "none")


def _inheritance(context: WorkloadContext) -> Plan:
    turns, new = context.number("turns"), context.number("max_new_tokens")
    plan = context.builder("kv-inheritance")
    plan.open("s0")
    for turn in range(turns):
        plan.turn(
            "s0", context.opening(24) if turn == 0 else 8, new, logprobs="output", label=f"turn {turn + 1}"
        )
    plan.close("s0")
    return context.plan(plan, "cached_turn", *features_seen(context, together=1, decode=new, prompt=24))


def _logprob_concurrent(context: WorkloadContext) -> Plan:
    count, turns, new = context.number("sessions"), context.number("turns"), context.number("max_new_tokens")
    plan = context.builder("logprob-concurrent")
    # One session a round begins with a prompt longer than the prefill chunk, each in its turn.
    long = _long_prompt(context, count, turns * (24 + new))
    for mode in MODES:
        for round_ in range(context.rounds):
            names = [f"{mode}-r{round_}-s{at}" for at in range(count)]
            for name in names:
                plan.open(name)
            plan.fence()
            for turn in range(turns):
                for at, name in enumerate(names):
                    first_long = turn == 0 and at == round_ % count
                    size = long if first_long else plan.between(16, 24)
                    label = f"{mode} round {round_ + 1} {name} turn {turn + 1}"
                    plan.turn(name, size, new, logprobs=mode, label=label)
                plan.fence()
            for name in names:
                plan.close(name)
            plan.fence()
    seen = features_seen(context, together=count, decode=new, prompt=long)
    return context.plan(plan, "cached_turn", *seen)


def _long_prompt(context: WorkloadContext, together: int, rest: int) -> int:
    """A prompt length a little above the prefill chunk, or 24 where no such prompt fits beside the others."""
    if context.chunk is None:
        return 24
    size = context.chunk + 17
    fits = room(context.cell, 1, size + together * (rest + context.cell.features.page_size)) is None
    return size if fits and size + rest <= longest(context.cell) else 24


def _stress(context: WorkloadContext) -> Plan:
    count, others = context.number("sessions"), context.number("plain")
    turns, new = context.number("turns"), context.number("max_new_tokens")
    prompt = context.number("prompt_tokens")
    plan = context.builder("stress-concurrent")
    budget = share(context.cell, count + others)
    first = min(prompt, budget - turns * new - (turns - 1) * 4)
    later = min(prompt, (budget - first - turns * new) // max(1, turns - 1))
    longest_prompt = 0
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        plan.fence()
        for turn in range(turns):
            for name in names:
                size = (first if turn == 0 else later) - plan.between(0, 3)
                longest_prompt = max(longest_prompt, size)
                plan.turn(name, size, new, logprobs="output", label=f"{name} turn {turn + 1}")
            for at in range(others):
                plan.generate(first - plan.between(0, 3), new, label=f"plain {at} beside turn {turn + 1}")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    seen = features_seen(context, together=count + others, decode=new, prompt=longest_prompt)
    return context.plan(plan, "cached_turn", *seen)


def _abort_leak(context: WorkloadContext) -> Plan:
    count, others, new = context.number("sessions"), context.number("plain"), context.number("max_new_tokens")
    warm_up = context.number("warm_up_tokens")
    over = max(context.number("over_length"), context.cell.features.context_length + 88)
    plan = context.builder("abort-leak-repro")
    # Sessions live as long as their context lasts: all eight rounds in 512 tokens.
    lifetime = max(1, (longest(context.cell) - APPEND - warm_up) // (2 * (APPEND + new)))
    names: list[str] = []
    for round_ in range(context.rounds):
        if round_ % lifetime == 0:
            for name in names:
                plan.close(name)
            names = [f"g{round_ // lifetime}-s{at}" for at in range(count)]
            for name in names:
                plan.open(name)
            plan.fence()
            for name in names:
                plan.turn(name, APPEND, warm_up, label=f"{name} warm-up")
            plan.fence()
        here = f"round {round_ + 1}"
        for name in names:
            plan.turn(name, APPEND, new, label=f"{here} {name} turn")
        for at in range(others):
            plan.generate(APPEND, new, label=f"{here} plain {at}")
        plan.fence()
        for name in names:
            plan.turn(name, over, new, expect="reject", label=f"{here} {name} over-length")
        plan.fence()
        for name in names:
            plan.turn(name, APPEND, new, label=f"{here} {name} recovery")
        plan.fence()
    for name in names:
        plan.close(name)
    seen = features_seen(context, together=count + others, decode=new, prompt=APPEND)
    return context.plan(plan, "cached_turn", "reject", *seen)


def _fits(requests: Sequence[str], tokens: Callable[[Numbers], int]) -> Applies:
    """Whether as many requests as these parameters add up to fit, each with so many tokens at least."""

    def applies(cell: Cell, params: Numbers) -> str | None:
        return room(cell, sum(int(params[name]) for name in requests), tokens(params))

    return applies


SESSIONS = (
    Workload(
        "kv-inheritance",
        "One session, three turns: each inherits exactly what the turn before it left.",
        _inheritance,
        {"turns": 3, "max_new_tokens": 12},
        lambda cell, params: room(cell, 1, 24 + int(params["turns"]) * (8 + int(params["max_new_tokens"]))),
    ),
    Workload(
        "logprob-concurrent",
        "Concurrent sessions in three log-prob modes; all turns of one number are in flight at once.",
        _logprob_concurrent,
        {"sessions": 6, "turns": 5, "rounds": 10, "max_new_tokens": 8},
        _fits(["sessions"], lambda params: int(params["turns"]) * (24 + int(params["max_new_tokens"]))),
    ),
    Workload(
        "stress-concurrent",
        "Sessions and plain requests side by side, with prompts of about 200 tokens.",
        _stress,
        {"sessions": 8, "plain": 4, "turns": 6, "rounds": 1, "max_new_tokens": 16, "prompt_tokens": 200},
        _fits(["sessions", "plain"], lambda params: int(params["turns"]) * (8 + int(params["max_new_tokens"]))),
    ),
    Workload(
        "abort-leak-repro",
        "Rounds of turns, over-length turns that must be rejected, and turns that recover from them.",
        _abort_leak,
        {"sessions": 4, "plain": 2, "rounds": 8, "max_new_tokens": 4, "warm_up_tokens": 16, "over_length": 600},
        _fits(["sessions", "plain"], lambda params: APPEND + 16 + 2 * (APPEND + int(params["max_new_tokens"]))),
    ),
)
