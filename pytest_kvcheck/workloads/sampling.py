"""What sampling parameters do to accounts: stop ids that end a turn early, and several answers to one prompt.

Stop *strings* are left out: servers run without a tokenizer here, so that they know no strings. For the account
they are the same as stop ids: output that ends in the middle of what was accepted.
"""

from __future__ import annotations

from pytest_kvcheck.operations import Plan
from pytest_kvcheck.workloads.base import Workload, WorkloadContext, at_once, room, share

APPEND = 12
FIRST = 24
# How many answers the groups of one round want; one more group is left by its client.
GROUPS, LEFT = (2, 3, 4), 3
PREFIX = 32
# The prompt of a group's request behind the shared prefix.
OWN = 8


def _stop_ids(context: WorkloadContext) -> Plan:
    """Turns and plain requests end at stop ids, after a few tokens and with speculation often in the middle of
    what a round accepted; the next turn must inherit what was shown, and nothing behind it.
    """
    plan = context.builder("stop-ids")
    count, new = context.number("sessions"), context.number("max_new_tokens")
    stop_ids = plan.stop_ids()
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
        plan.fence()
        for turn in range(context.number("turns")):
            for name in names:
                plan.turn(
                    name,
                    APPEND if turn else context.opening(FIRST),
                    new,
                    logprobs="output",
                    stop_ids=stop_ids,
                    label=f"{name} turn {turn + 1}",
                )
            for at in range(context.number("plain")):
                label = f"plain {at} beside turn {turn + 1}"
                plan.generate(FIRST, new, logprobs="output", stop_ids=stop_ids, stream=at % 2 == 0, label=label)
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    speculation = ("speculation",) if context.cell.features.speculative else ()
    return context.plan(plan, "stopped", "cached_turn", *speculation)


def _parallel_samples(context: WorkloadContext) -> Plan:
    """Groups of answers to prompts that begin alike, beside sessions; the client of one group leaves."""
    plan = context.builder("parallel-samples")
    count, new = context.number("sessions"), context.number("max_new_tokens")
    together = at_once(context.cell, count + sum(GROUPS) + LEFT)
    long = min(context.number("left_tokens"), share(context.cell, together) - PREFIX - OWN)
    for round_ in range(context.rounds):
        names = [f"r{round_}-s{at}" for at in range(count)]
        for name in names:
            plan.open(name)
            plan.turn(name, context.opening(FIRST), new, logprobs="output", label=f"{name} turn 1")
        plan.fence()
        prefix = plan.ids(PREFIX)
        for samples in GROUPS:
            plan.generate(
                prefix + plan.ids(OWN),
                new + samples,
                logprobs="output",
                stream=False,
                samples=samples,
                label=f"round {round_ + 1} group of {samples}",
            )
        left = plan.generate(
            prefix + plan.ids(OWN), long, stream=False, samples=LEFT, expect="either", label="left group"
        )
        plan.disconnect(left, when_tokens=0)
        for turn in (2, 3):
            for name in names:
                plan.turn(name, APPEND, new, logprobs="output", label=f"{name} turn {turn}")
        plan.fence()
        plan.generate(prefix + plan.ids(OWN), new, logprobs="output", label="after the groups")
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan, "parallel_samples", "disconnect", "cached_turn")


SAMPLING = (
    Workload(
        "stop-ids",
        "Turns and requests end at stop ids, often in mid-draft; the next turn inherits what was shown.",
        _stop_ids,
        {"sessions": 3, "plain": 2, "turns": 5, "rounds": 2, "max_new_tokens": 24},
        lambda cell, params: room(
            cell,
            int(params["sessions"]) + int(params["plain"]),
            FIRST + int(params["turns"]) * (APPEND + int(params["max_new_tokens"])),
        ),
    ),
    Workload(
        "parallel-samples",
        "Groups of two to four answers to one prompt, beside sessions; the client of one group leaves.",
        _parallel_samples,
        {"sessions": 2, "rounds": 2, "max_new_tokens": 12, "left_tokens": 800},
        lambda cell, params: room(
            cell,
            at_once(cell, int(params["sessions"]) + sum(GROUPS) + LEFT),
            PREFIX + OWN + 4 * (APPEND + int(params["max_new_tokens"])),
        ),
    ),
)
