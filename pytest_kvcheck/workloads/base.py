"""What a workload is: a name, its parameters, and a function from a cell and a seed to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.workloads.plan import PlanBuilder

Param = int | float | str | bool
Numbers = Mapping[str, Param]
# The reason why a cell cannot run a workload with these (complete) parameters, or None.
Applies = Callable[[Cell, Numbers], str | None]

# Engines keep a few positions of a context for themselves (SGLang 6), and a pool page or two.
CONTEXT_RESERVE = 16


@dataclass(frozen=True, slots=True)
class WorkloadContext:
    """What a workload makes its plan from. ``params`` are complete; ``scale`` multiplies rounds only.

    ``sessions`` is the engine's word (``Rules.sessions``): "resent" where the client sends histories itself.
    """

    cell: Cell
    vocab_size: int
    seed: int
    params: Numbers
    scale: float = 1.0
    sessions: Literal["streaming", "resent"] = "streaming"

    def number(self, name: str) -> int:
        return int(self.params[name])

    @property
    def rounds(self) -> int:
        """The parameter ``rounds`` after scaling, at least 1."""
        return max(1, round(self.number("rounds") * self.scale))

    @property
    def chunk(self) -> int | None:
        """The prefill chunk, or None where no prompt can be longer than one."""
        size = self.cell.features.chunked_prefill
        return size if size is not None and size < longest(self.cell) else None

    def opening(self, size: int) -> int:
        """Tokens of a session's first turn: ``size``, but where histories are sent again more than the pages
        that it takes for a hit.

        Of such a history only whole pages are cached, so one that is shorter would prove nothing.
        """
        pages, page = self._pages_of_a_hit, self.cell.features.page_size
        fits = (pages + 1) * page + CONTEXT_RESERVE < self.cell.features.context_length
        return max(size, pages * page + 1, pages * 48) if self.sessions == "resent" and fits else size

    @property
    def _pages_of_a_hit(self) -> int:
        """How many full pages of a history it takes for a hit: with a draft the last is computed anew."""
        return 1 if self.cell.features.speculative is None else 2

    def builder(self, workload: str) -> PlanBuilder:
        return PlanBuilder(workload, self.seed, self.vocab_size)

    def plan(self, builder: PlanBuilder, *must_exercise: str) -> Plan:
        """The finished plan; its parameters say how many rounds there really are.

        A cached turn is not demanded of a plan whose histories, sent again, never fill a page, nor without a
        prefix cache.
        """
        if self.sessions == "resent" and not self._fills_a_page(builder):
            must_exercise = tuple(name for name in must_exercise if name != "cached_turn")
        rounds = {"rounds": self.rounds} if "rounds" in self.params else {}
        return Plan(
            workload=builder.workload,
            seed=self.seed,
            operations=tuple(builder.operations),
            params={**self.params, **rounds},
            must_exercise=must_exercise,
        )

    def _fills_a_page(self, builder: PlanBuilder) -> bool:
        """Whether hits are possible, and some turn follows on a history of more pages than one takes."""
        if not self.cell.features.prefix_cache:
            return False
        history: dict[str, int] = {}
        for op in builder.operations:
            if op.kind != "turn" or op.session is None or op.expect != "finish":
                continue
            before = history.get(op.session, 0)
            if before > self._pages_of_a_hit * self.cell.features.page_size:
                return True
            history[op.session] = before + len(op.input_ids) + (1 if op.stop_ids else op.max_new_tokens)
        return False


@dataclass(frozen=True, slots=True)
class Workload:
    """A generator of plans. ``params`` maps the names of its parameters to their defaults.

    ``grows``: a greater budget means more rounds of it, not only a smaller one fewer.
    """

    name: str
    doc: str
    make: Callable[[WorkloadContext], Plan]
    params: Numbers = field(default_factory=dict)
    applies: Applies = lambda cell, params: None
    grows: bool = False


def longest(cell: Cell) -> int:
    """The longest sequence (prompt and output) in tokens that the cell's server can surely hold."""
    pool = cell.features.pool_tokens
    limit = cell.features.context_length if pool is None else min(cell.features.context_length, pool)
    return limit - CONTEXT_RESERVE


def share(cell: Cell, requests: int) -> int:
    """How many tokens each of so many requests may hold at the same time without filling the pool.

    A whole page is taken off for the partly filled one, and for the rest of the pool a fifth: speculation and
    decoding claim ahead.
    """
    pool = cell.features.pool_tokens
    if pool is None:
        return longest(cell)
    return max(0, min(longest(cell), int(pool * 0.8) // requests - cell.features.page_size))


def at_once(cell: Cell, requests: int) -> int:
    """How many of so many plain requests run at the same time; the others wait."""
    return min(requests, cell.features.max_running)


def rows(cell: Cell, needed: int) -> str | None:
    """The reason why so many requests and sessions cannot be held at once, or None."""
    if needed > cell.features.max_running:
        return f"needs max_running >= {needed}, the cell has {cell.features.max_running}"
    return None


def room(cell: Cell, requests: int, tokens: int) -> str | None:
    """The reason why so many requests of so many tokens do not fit at once, or None."""
    if tokens > longest(cell):
        found = cell.features.context_length
        return f"needs context_length >= {tokens + CONTEXT_RESERVE}, the cell has {found}"
    if tokens > share(cell, requests):
        needs = int(requests * (tokens + cell.features.page_size) / 0.8) + 1
        return f"needs pool_tokens >= {needs}, the cell has {cell.features.pool_tokens}"
    return rows(cell, requests)


def server_sessions(cell: Cell) -> str | None:
    """The reason why no server-held sessions exist in the cell, or None."""
    if not cell.features.streaming_session:
        return "needs streaming_session: true"
    if cell.engine == "vllm":
        return "vLLM holds no sessions over HTTP: histories are sent again with each turn"
    return None


def features_seen(
    context: WorkloadContext, *, together: int, decode: int, prompt: int, retract: bool = True
) -> tuple[str, ...]:
    """Which features of the cell a plan surely exercises: ``together`` requests decode ``decode`` tokens at
    the same time, the longest prompt has ``prompt`` new tokens. ``retract`` False where requests may end early.
    """
    features = context.cell.features
    seen = []
    # One request alone is never retracted.
    if features.retract is not None and retract and together >= 2 and decode > features.retract.interval:
        seen.append("retract")
    if features.chunked_prefill is not None and prompt > features.chunked_prefill:
        seen.append("chunked_prefill")
        if features.mixed_chunk and together >= 2 and decode >= 2:
            seen.append("mixed_chunk")
    if features.speculative is not None and decode >= 2:
        seen.append("speculation")
    return tuple(seen)
