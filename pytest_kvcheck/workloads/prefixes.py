"""Shared prefixes and page edges: where a prefix cache shares, splits and gives back."""

from __future__ import annotations

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.workloads.base import Numbers, Workload, WorkloadContext, at_once, longest, room, share

# Requests of one fence: enough to batch, few enough to leave no queue behind.
TOGETHER = 16


def _page_edges(context: WorkloadContext) -> Plan:
    """Prompts of every length up to a page and one more, and turns that end beside and on page ends."""
    plan = context.builder("page-edges")
    page = max(context.cell.features.page_size, 8)
    base = plan.ids(page + 1)
    for round_ in range(context.rounds):
        # The first round shares one prefix; later ones begin anew, so that nothing is cached.
        text = base if round_ == 0 else plan.ids(page + 1)
        for length in range(1, page + 2):
            plan.generate(text[:length], 1 + length % 3, logprobs="output", label=f"{length} tokens")
            if length % TOGETHER == 0:
                plan.fence()
        plan.fence()
        ends = (page - 1, page, page + 1)
        names = [f"r{round_}-end-{end}" for end in ends]
        for name in names:
            plan.open(name)
        for pages in range(1, 4):
            if pages * page + 1 > longest(context.cell):
                break
            for name, end in zip(names, ends, strict=True):
                new = end - 4 if pages == 1 else page - 4
                plan.turn(name, max(1, new), 4, logprobs="output", label=f"{name} page {pages}")
            plan.fence()
        for name in names:
            plan.close(name)
        plan.fence()
    return context.plan(plan)


def _prefix_fanout(context: WorkloadContext) -> Plan:
    """Many requests on one fresh prefix at once; every fourth is cancelled at a token count of its own."""
    plan = context.builder("prefix-fanout")
    fan, new = context.number("fan"), context.number("max_new_tokens")
    wanted = max(128, 2 * context.cell.features.page_size + 3)
    size = min(wanted, share(context.cell, at_once(context.cell, fan)) - 8 - new)
    for _ in range(context.rounds):
        prefix = plan.ids(size)
        plan.generate(prefix, 2, label="publishes the prefix")
        plan.fence()
        for at in range(fan):
            if at % 4 == 3:
                cut = plan.generate(prefix + plan.ids(8), new, expect="either", label=f"fan {at} cancelled")
                plan.abort(cut, when_tokens=(0, 1, 2, 4, 8, 16)[at // 4 % 6])
            else:
                plan.generate(prefix + plan.ids(8), 16, logprobs="output", label=f"fan {at}")
        plan.fence()
        plan.generate(prefix + plan.ids(8), 16, logprobs="output", label="after the fan")
        plan.fence()
    return context.plan(plan, "abort_mid_decode")


def _repeated_prompts(context: WorkloadContext) -> Plan:
    """One prompt four times at once and four times in a row: cached must equal computed."""
    plan = context.builder("repeated-prompts")
    page = context.cell.features.page_size
    for round_ in range(context.rounds):
        # Whole pages (a full hit) and ragged ends take different paths.
        for extra in (0, 1, page // 2 + 3):
            prompt = plan.ids(_pages(context.cell) * page + extra)
            for at in range(4):
                plan.generate(prompt, 8, logprobs="output", label=f"round {round_ + 1} +{extra} twin {at}")
            plan.fence()
            for at in range(4):
                plan.generate(prompt, 8, logprobs="output", label=f"round {round_ + 1} +{extra} again {at}")
                plan.fence()
    return context.plan(plan)


def _pages(cell: Cell) -> int:
    """Whole pages of at least 64 tokens together."""
    return max(1, -(-64 // cell.features.page_size))


def _repeated_applies(cell: Cell, params: Numbers) -> str | None:
    page = cell.features.page_size
    return room(cell, 4, _pages(cell) * page + page // 2 + 16)


PREFIXES = (
    Workload(
        "page-edges",
        "Prompts of every length up to a page and one more, and turns that end beside and on page ends.",
        _page_edges,
        {"rounds": 1},
        lambda cell, params: room(cell, 3, max(cell.features.page_size, 8) + 8),
    ),
    Workload(
        "prefix-fanout",
        "Sixteen requests on one prefix, every fourth of them cancelled at a token count of its own.",
        _prefix_fanout,
        {"fan": 16, "rounds": 2, "max_new_tokens": 64},
        lambda cell, params: room(cell, at_once(cell, int(params["fan"])), int(params["max_new_tokens"]) + 40),
    ),
    Workload(
        "repeated-prompts",
        "One prompt four times at once and four times in a row.",
        _repeated_prompts,
        {"rounds": 2},
        _repeated_applies,
    ),
)
