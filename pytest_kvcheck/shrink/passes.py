"""Smaller plans and simpler cells: pure functions from a plan to candidates, each of them legal to run."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from pytest_kvcheck.cells import Cell, Features
from pytest_kvcheck.operations import Operation, Plan

Unit = frozenset[int]


def with_operations(plan: Plan, operations: Iterable[Operation]) -> Plan:
    """The plan with other operations; what it had to exercise is no concern of a part of it."""
    return changed(plan, operations=tuple(operations), must_exercise=())


def without(plan: Plan, dropped: Iterable[int]) -> Plan:
    """The plan less some operations, and less what makes no sense without them: a session's operations without
    its open, an abort without its target. What waited for a dropped operation waits for what that waited for.
    """
    gone = set(dropped)
    unopened = {op.session for op in plan.operations if op.kind == "open" and op.id in gone}
    kept: list[Operation] = []
    inherited: dict[int, tuple[int, ...]] = {}
    for op in plan.operations:
        after = _ordered(one for earlier in op.after for one in inherited.get(earlier, (earlier,)))
        orphan = op.session is not None and op.session in unopened
        if op.id in gone or orphan or op.target in gone:
            gone.add(op.id)
            inherited[op.id] = after
        else:
            kept.append(changed(op, after=after))
    return with_operations(plan, kept)


def _ordered(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ids)))


def direct(plan: Plan) -> Plan:
    """The plan without its ordering points: each operation names what it waits for, and nothing twice."""
    return _reduced(without(plan, _points(plan)))


def _points(plan: Plan) -> set[int]:
    """The ordering points: what waits for all that stands before them."""
    return {op.id for op in plan.operations if op.kind == "barrier" and op.target is None}


def _reduced(plan: Plan) -> Plan:
    """Without those ``after`` that others imply."""
    before: dict[int, set[int]] = {}
    kept = []
    for op in plan.operations:
        implied = {far for near in op.after for far in before[near]}
        before[op.id] = implied | set(op.after)
        kept.append(changed(op, after=tuple(one for one in op.after if one not in implied)))
    return with_operations(plan, kept)


def renumbered(plan: Plan) -> Plan:
    """Ids from 0, in order."""
    number = {op.id: at for at, op in enumerate(plan.operations)}
    return with_operations(
        plan,
        (
            changed(
                op,
                id=number[op.id],
                after=tuple(number[one] for one in op.after),
                target=None if op.target is None else number[op.target],
            )
            for op in plan.operations
        ),
    )


def size(plan: Plan) -> int:
    """How many operations the plan has, ordering points apart."""
    return sum(op.kind != "barrier" or op.target is not None for op in plan.operations)


# --- what can be dropped -------------------------------------------------------------------------------
def actors(plan: Plan) -> list[Unit]:
    """A session with all that it does, or a plain request; each with what aims at it."""
    groups: dict[str, set[int]] = {}
    owner: dict[int, str] = {}
    for op in plan.operations:
        aimed = owner.get(op.target) if op.target is not None and not op.generates else None
        name = f"session {op.session}" if op.session is not None else aimed or f"operation {op.id}"
        owner[op.id] = name
        groups.setdefault(name, set()).add(op.id)
    return [frozenset(ids) for ids in groups.values()]


def beside(plan: Plan, suspect: int) -> Plan:
    """Only who does something between the same ordering points as the suspect, each with all that it does."""
    points, stage, at = _points(plan), 0, {}
    for op in plan.operations:
        stage += op.id in points
        at[op.id] = stage
    kept = {one for unit in actors(plan) if any(at[op] == at.get(suspect) for op in unit) for one in unit}
    return without(plan, [op.id for op in plan.operations if op.id not in kept | points])


def singles(plan: Plan) -> list[Unit]:
    """Every operation by itself; :func:`without` takes what hangs on it."""
    return [frozenset({op.id}) for op in plan.operations]


# --- what can be smaller -------------------------------------------------------------------------------
def prompt_sizes(length: int, page: int) -> list[int]:
    """Shorter lengths worth a try, the shortest first: one token, the edges of a page, the half."""
    edges = {1, page - 1, page, page + 1, 2 * page, length // 2}
    return sorted(one for one in edges if 1 <= one < length)


def output_sizes(tokens: int) -> list[int]:
    return sorted(one for one in {1, 2, 4, 8, tokens // 2} if 1 <= one < tokens)


def resized(plan: Plan, ids: Iterable[int], *, prompt: int | None = None, output: int | None = None) -> Plan:
    """The plan with no more than so many new tokens in these requests; what waits for a token waits for one
    that still comes.
    """
    chosen = set(ids)
    operations = []
    for op in plan.operations:
        if op.id in chosen and op.generates:
            if prompt is not None:
                op = changed(op, input_ids=op.input_ids[:prompt])
            if output is not None:
                op = changed(op, max_new_tokens=min(op.max_new_tokens, output))
        operations.append(op)
    new = {op.id: op.max_new_tokens for op in operations}
    return with_operations(
        plan,
        (
            changed(op, when_tokens=min(op.when_tokens, max(0, new[op.target] - 1)))
            if op.target is not None and not op.generates
            else op
            for op in operations
        ),
    )


def in_sequence(plan: Plan) -> Plan:
    """One operation after another, but for what aims at a request while it runs."""
    operations: list[Operation] = []
    before: tuple[int, ...] = ()
    for op in plan.operations:
        if op.target is None:
            operations.append(changed(op, after=before))
            before = (op.id,)
        else:
            operations.append(op)
            before = (*before, op.id)
    return _reduced(with_operations(plan, operations))


def ids(count: int, seed: int, high: int) -> tuple[int, ...]:
    """Token ids as a reproduction's own ``ids(count, seed)`` makes them."""
    chosen = random.Random(seed)
    return tuple(chosen.randrange(10, high) for _ in range(count))


def highest_id(plan: Plan) -> int:
    """One more than the greatest token id of the plan, and enough to draw from."""
    return max((one + 1 for op in plan.operations for one in op.input_ids), default=100)


def with_seeded_prompts(plan: Plan) -> Plan:
    """Every prompt drawn from its operation's id as seed: shorter to write down than its tokens."""
    high = highest_id(plan)
    if high < 32:
        return plan
    return with_operations(
        plan, (changed(op, input_ids=ids(len(op.input_ids), op.id, high)) for op in plan.operations)
    )


def sessionless(plan: Plan, session: str) -> Plan:
    """A session with no more than one turn as a plain request; the plan itself where it has more."""
    mine = [op for op in plan.operations if op.session == session]
    if sum(op.kind == "turn" for op in mine) != 1 or any(op.invalid for op in mine):
        return plan
    gone = [op.id for op in mine if op.kind != "turn"]
    plain = with_operations(
        plan,
        (
            changed(op, kind="generate", session=None, label="plain")
            if op.kind == "turn" and op.session == session
            else op
            for op in plan.operations
        ),
    )
    return without(plain, gone)


def plainer(plan: Plan, *, keep_logprobs: bool) -> Plan:
    """Streamed requests without log-probs, where log-probs are not the matter."""
    if keep_logprobs:
        return plan
    return with_operations(plan, (changed(op, logprobs="none") for op in plan.operations))


def stopping_at(plan: Plan, ids: Iterable[int]) -> Plan:
    """The plan with no other stop ids than these."""
    kept = frozenset(ids)
    return with_operations(
        plan,
        (changed(op, stop_ids=tuple(one for one in op.stop_ids if one in kept)) for op in plan.operations),
    )


def stop_ids(plan: Plan) -> list[Unit]:
    """Every token that some request stops at, by itself."""
    return [frozenset({one}) for one in sorted({one for op in plan.operations for one in op.stop_ids})]


def one_sample(plan: Plan) -> Plan:
    """One answer to each request."""
    return with_operations(plan, (changed(op, samples=1) for op in plan.operations))


def quick(plan: Plan, deadline: float) -> Plan:
    """No operation may take longer: for servers that hang."""
    return with_operations(plan, (changed(op, deadline=min(op.deadline, deadline)) for op in plan.operations))


# --- what the cell can do without ----------------------------------------------------------------------
def simpler_features(features: Features) -> list[tuple[str, Any]]:
    """Features that the cell has beyond the plainest one, and what each is without."""
    plain = replace(Features(), page_size=1)
    names = ("retract", "speculative", "mixed_chunk", "prefix_cache", "page_size")
    return [(name, getattr(plain, name)) for name in names if getattr(features, name) != getattr(plain, name)]


def with_feature(cell: Cell, name: str, value: Any) -> Cell:
    return replace(cell, features=replace(cell.features, **{name: value}))


def unstrict(cell: Cell) -> Cell:
    """The cell without the engine's own checks, so that its server outlives what they would find."""
    return with_feature(cell, "strict", False)
