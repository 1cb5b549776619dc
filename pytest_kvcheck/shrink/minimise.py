"""Confirm a failure, then minimise it: delta debugging over our own plans, for as long as the finding stays.

Every accepted step was seen to fail, so the result is never a guess; a step that fails only sometimes may be
refused, which costs size and nothing else.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.shrink import passes
from pytest_kvcheck.workloads.plan import check_plan

# Runs a plan in a cell and tells what was found; raises nothing for what a server did.
Probe = Callable[[Plan, Cell], list[Finding]]
# Findings that are no fault of the engine's.
NO_FAULT = ("unexercised", "inconclusive")
# 95 % of the normal distribution, two-sided.
Z = 1.96
CONFIRM = 3
# How often a part of a plan is run before it counts as harmless, where the fault does not always show.
RETRIES = 3
# So few operations need no second search.
SMALL = 6
# A server that hangs is told from a slow one by the canary; the plan's own operations need not wait long.
STUCK_DEADLINE = 15.0


@dataclass(frozen=True, slots=True)
class Rate:
    """``seen`` of ``tried`` runs showed it; the interval is Wilson's, at 95 %."""

    seen: int
    tried: int

    @property
    def interval(self) -> tuple[float, float]:
        if not self.tried:
            return 0.0, 1.0
        n, share = self.tried, self.seen / self.tried
        middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.seen} of {self.tried} runs (95 % interval {low:.0%} to {high:.0%})"


@dataclass(slots=True)
class Budget:
    """How much may be spent; what is left is found when it is spent, and the best so far is the result."""

    probes: int = 150
    seconds: float = 900.0
    used: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> bool:
        return self.used >= self.probes or self.elapsed >= self.seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


@dataclass(slots=True)
class Minimised:
    """The smallest plan and simplest cell that still failed, and the finding as it was seen last.

    ``first`` and ``last`` are how often the whole and the minimised plan failed when they were run again;
    ``exhausted``: the budget ended the search. ``steps`` tell the way, one line each.
    """

    plan: Plan
    cell: Cell
    finding: Finding
    first: Rate
    last: Rate
    operations_before: int
    probes: int
    seconds: float
    exhausted: bool
    steps: list[str]

    @property
    def operations(self) -> int:
        return passes.size(self.plan)


def same(finding: Finding, target: Finding) -> bool:
    """Whether it is the same fault: equal identity, or a kind that each of the two named beside its own."""
    if finding.identity == target.identity:
        return True
    alike = finding.identity[1:] == target.identity[1:]
    return alike and finding.kind in target.also and target.kind in finding.also


def worst(findings: Iterable[Finding]) -> Finding | None:
    """The gravest finding that is the engine's fault; ``judge`` puts the gravest first."""
    return next((finding for finding in findings if finding.status not in NO_FAULT), None)


def confirm(plan: Plan, cell: Cell, target: Finding, probe: Probe, times: int) -> tuple[Rate, Finding | None]:
    """Run it again; how often the finding came, and the last one that did."""
    seen, last = 0, None
    for _ in range(times):
        hit = next((one for one in probe(plan, cell) if same(one, target)), None)
        seen, last = seen + (hit is not None), hit or last
    return Rate(seen, times), last


def minimise(
    plan: Plan,
    cell: Cell,
    target: Finding,
    probe: Probe,
    *,
    budget: Budget | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Minimised | None:
    """The smallest failing plan within the budget; None where the failure did not come again at all."""
    search = _Search(plan, cell, target, probe, budget or Budget(), progress)
    return search.run()


class _Search:
    """One minimisation under way: the best plan and cell so far, and what was tried."""

    def __init__(
        self,
        plan: Plan,
        cell: Cell,
        target: Finding,
        probe: Probe,
        budget: Budget,
        progress: Callable[[str], None],
    ) -> None:
        self.plan, self.cell, self.target = plan, cell, target
        self.finding = target
        self.budget, self.progress = budget, progress
        self._probe = probe
        self._tried: dict[bytes, bool] = {}
        self._attempts = 1
        self._repeat = 1
        self._steps: list[str] = []

    def run(self) -> Minimised | None:
        before = passes.size(self.plan)
        whole = passes.with_operations(self.plan, self.plan.operations)
        if self.target.status == "stuck":
            whole = passes.quick(whole, STUCK_DEADLINE)
        first, seen = confirm(whole, self.cell, self.target, self._counted, CONFIRM)
        if seen is None:
            return None
        self.plan, self.finding = whole, seen
        # A fault that shows only sometimes gets a few chances to show in each smaller plan.
        self._attempts = 1 if first.seen == first.tried else RETRIES
        self._quieter_cell()
        self._suspects()
        self._accept(passes.direct(self.plan), "ordering points")
        self._reduce()
        if passes.size(self.plan) > SMALL and self._attempts == 1:
            # What always shows in a long plan, which has many chances, may show only sometimes in a part of it.
            self._attempts = RETRIES
            self._tried = {key: shown for key, shown in self._tried.items() if shown}
            self._reduce()
        reduced = self.plan, self.cell
        # Smaller sizes bring races to their edge: such a step must show the fault twice.
        self._repeat = 2 if first.seen == first.tried else 1
        self._shorten()
        self._calm()
        self._simplify_cell()
        self._reduce()
        final = passes.renumbered(self.plan)
        if self._accept(passes.with_seeded_prompts(final), "prompts from seeds"):
            final = self.plan
        last, seen = confirm(final, self.cell, self.target, self._counted, CONFIRM)
        if last.seen < first.seen:
            plan = passes.renumbered(reduced[0])
            rate, again = confirm(plan, reduced[1], self.target, self._counted, CONFIRM)
            if rate.seen > last.seen:
                self._steps.append(
                    f"back to {passes.size(plan)} operations in their first sizes: they fail more often"
                )
                final, self.cell, last, seen = plan, reduced[1], rate, again
        return Minimised(
            plan=final,
            cell=self.cell,
            finding=seen or self.finding,
            first=first,
            last=last,
            operations_before=before,
            probes=self.budget.used,
            seconds=self.budget.elapsed,
            exhausted=self.budget.spent,
            steps=self._steps,
        )

    # --- probing ---------------------------------------------------------------------------------
    def _counted(self, plan: Plan, cell: Cell) -> list[Finding]:
        self.budget.used += 1
        return self._probe(plan, cell)

    def _fails(self, plan: Plan, cell: Cell) -> bool:
        """Whether it still fails the same way; remembered, and False once the budget is spent."""
        key = msgspec.json.encode([plan.operations, cell.launch_key])
        if key not in self._tried:
            if self.budget.spent or not _legal(plan):
                return False
            self._tried[key] = all(self._shows(plan, cell) for _ in range(self._repeat))
        return self._tried[key]

    def _shows(self, plan: Plan, cell: Cell) -> bool:
        for _ in range(self._attempts):
            hit = next((one for one in self._counted(plan, cell) if same(one, self.target)), None)
            if hit is not None:
                self.finding = hit
                return True
            if self.budget.spent:
                break
        return False

    def _accept(self, plan: Plan, what: str, cell: Cell | None = None) -> bool:
        """Take the plan (and cell) if it still fails."""
        cell = cell or self.cell
        if plan.operations == self.plan.operations and cell == self.cell:
            return False
        if not self._fails(plan, cell):
            return False
        step = f"{what}: {passes.size(self.plan)} -> {passes.size(plan)} operations"
        self.plan, self.cell = plan, cell
        self._steps.append(step)
        self.progress(f"shrink: {step} ({self.budget.used} probes)")
        return True

    # --- passes ----------------------------------------------------------------------------------
    def _quieter_cell(self) -> None:
        """Without the engine's own checks, if the fault shows there too: its server outlives each probe."""
        if not self.cell.features.strict:
            return
        cell = passes.unstrict(self.cell)
        seen = worst(self._counted(self.plan, cell))
        if seen is not None and (seen.status, seen.pool) == (self.target.status, self.target.pool):
            self._steps.append(f"the engine's own checks off: {seen.kind} by {seen.oracle} instead")
            self.cell, self.target, self.finding = cell, seen, seen

    def _suspects(self) -> None:
        """What the finding points to, alone with all that ran beside it: nearly all of a long plan at once."""
        attempts, self._attempts = self._attempts, RETRIES
        for suspect in self.finding.operations:
            if self._accept(passes.beside(self.plan, suspect), f"what ran beside operation {suspect}"):
                rate, _ = confirm(self.plan, self.cell, self.target, self._counted, CONFIRM)
                self._attempts = 1 if rate.seen == rate.tried else RETRIES
                return
        self._attempts = attempts

    def _reduce(self) -> None:
        """Drop sessions and plain requests, then single operations, until nothing more can go."""
        self._drop(passes.actors, "sessions and requests")
        size = None
        while size != len(self.plan.operations) and not self.budget.spent:
            size = len(self.plan.operations)
            self._drop(passes.singles, "operations")

    def _drop(self, units_of: Callable[[Plan], list[passes.Unit]], what: str) -> None:
        """ddmin over units: try to keep one part alone, then to drop one part, in ever finer parts."""
        whole, before = self.plan, len(self.plan.operations)
        kept = self._ddmin(units_of(whole), lambda units: _only(whole, units))
        plan = _only(whole, kept)
        if len(plan.operations) < before:
            self._accept(plan, what)

    def _ddmin(
        self, units: list[passes.Unit], plan_of: Callable[[Sequence[passes.Unit]], Plan]
    ) -> list[passes.Unit]:
        parts = 2
        while len(units) >= 2 and not self.budget.spent:
            edges = [len(units) * at // parts for at in range(parts + 1)]
            runs = list(itertools.pairwise(edges))
            # From the end: what comes behind the fault is the likeliest to be of no matter.
            complements = [units[:low] + units[high:] for low, high in reversed(runs)]
            subsets = [units[low:high] for low, high in runs] if parts == 2 else []
            smaller = next(
                (some for some in (*subsets, *complements) if some and self._fails(plan_of(some), self.cell)),
                None,
            )
            if smaller is not None:
                parts = 2 if len(smaller) <= len(units) // 2 else max(parts - 1, 2)
                units = smaller
            elif parts < len(units):
                parts = min(parts * 2, len(units))
            else:
                break
        return units

    def _shorten(self) -> None:
        """Prompts and outputs: all of them at once, then one by one."""
        page = self.cell.features.page_size
        everything = [op.id for op in self.plan.operations if op.generates]
        for size in passes.prompt_sizes(
            max((len(op.input_ids) for op in self.plan.operations), default=0), page
        ):
            if self._accept(passes.resized(self.plan, everything, prompt=size), f"prompts of at most {size}"):
                break
        for size in passes.output_sizes(max((op.max_new_tokens for op in self.plan.operations), default=0)):
            if self._accept(passes.resized(self.plan, everything, output=size), f"outputs of at most {size}"):
                break
        for number in everything:
            op = next(one for one in self.plan.operations if one.id == number)
            for size in passes.prompt_sizes(len(op.input_ids), page):
                if self._accept(passes.resized(self.plan, [number], prompt=size), f"prompt of {size}"):
                    break
            for size in passes.output_sizes(op.max_new_tokens):
                if self._accept(passes.resized(self.plan, [number], output=size), f"output of {size}"):
                    break

    def _calm(self) -> None:
        """No sessions, less at once, and no log-probs, where they are not the matter."""
        for session in dict.fromkeys(op.session for op in self.plan.operations if op.session is not None):
            self._accept(passes.sessionless(self.plan, session), f"session {session} as a plain request")
        self._accept(passes.in_sequence(self.plan), "one after another")
        logprobs = self.target.oracle in ("logprobs", "self_test", "protocol")
        self._accept(passes.plainer(self.plan, keep_logprobs=logprobs), "without log-probs")
        self._accept(passes.one_sample(self.plan), "one answer to each request")
        if not self._accept(passes.stopping_at(self.plan, ()), "without stop ids"):
            whole = self.plan
            kept = self._ddmin(
                passes.stop_ids(whole), lambda units: passes.stopping_at(whole, frozenset().union(*units))
            )
            self._accept(passes.stopping_at(whole, frozenset().union(*kept)), "fewer stop ids")

    def _simplify_cell(self) -> None:
        for name, value in passes.simpler_features(self.cell.features):
            self._accept(self.plan, f"without {name}", passes.with_feature(self.cell, name, value))


def _only(plan: Plan, units: Sequence[passes.Unit]) -> Plan:
    kept = frozenset().union(*units) if units else frozenset()
    return passes.without(plan, [op.id for op in plan.operations if op.id not in kept])


def _legal(plan: Plan) -> bool:
    """Whether it can be run, and asks for something: the harness's own requests must not be what fails."""
    if not any(op.generates for op in plan.operations):
        return False
    try:
        check_plan(plan.operations)
    except ValueError:
        return False
    return True
