"""One trace's histories on two servers: do both give the same log-probs to the same tokens?

Each history is scored in one piece, on each server alone. Two engines never agree to the bit, so what counts is
a history that differs far more than its like: such a one is wrong on one of them. Where all differ, the servers
compute different models (weights, precision, a missing layer), and no single history is to blame.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_kvcheck.cells import ENGINE_NAMES, Cell
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.matrix.loader import load, resolve
from pytest_kvcheck.oracles.noise import OUTLIER_TIMES, Spread, allowance
from pytest_kvcheck.oracles.references import Emitted, References, at, emitted
from pytest_kvcheck.trace import OpRecord, read_trace
from pytest_kvcheck.workloads import parameter_names, replay
from pytest_kvcheck.workloads.runner import Runner

# Medians above this many nats are no arithmetic noise: the two servers do not compute the same function.
SAME_MODEL = 0.25


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers: ``url`` of one that runs, or a cell to start with an engine's interpreter."""

    cell: Cell
    python: str = ""
    url: str | None = None

    @property
    def name(self) -> str:
        return self.url or f"{self.cell.engine} ({self.cell.name})"


@dataclass(frozen=True, slots=True)
class Difference:
    """One history whose log-probs differ beyond noise; ``position`` counts its tokens from 0."""

    label: str
    position: int
    token: int
    left: float
    right: float
    spread: Spread

    def __str__(self) -> str:
        return (
            f"{self.label}: token {self.token} at position {self.position} has log-prob {self.left:.4f} on the "
            f"left and {self.right:.4f} on the right ({self.spread})"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two servers said of the same histories; ``typical`` is the median of their greatest deltas."""

    left: str
    right: str
    histories: int
    noise: Spread
    typical: float
    differences: tuple[Difference, ...] = ()

    @property
    def same_model(self) -> bool:
        return self.typical <= SAME_MODEL

    @property
    def agrees(self) -> bool:
        return self.same_model and not self.differences and self.histories > 0

    def text(self) -> str:
        """The verdict as paragraphs for a person."""
        head = f"{self.histories} histories on {self.left} (left) and {self.right} (right)"
        if not self.histories:
            return f"{head}: none could be compared; the trace needs finished requests that both can score."
        if not self.same_model:
            return (
                f"{head}: half of them differ by more than {self.typical:.3g} nats, so the servers do not "
                "compute the same model; compare weights, precision and quantisation first."
            )
        lines = [f"{head}: {len(self.differences)} differ beyond noise ({self.noise})."]
        lines += [f"  {one}" for one in self.differences]
        return "\n".join(lines)


def compare_trace(
    trace: Path, left: Side, right: Side, *, artifacts: Path, limit: int | None = 200
) -> Comparison:
    """Score the histories of a trace's workload on both servers, one server after the other.

    ``limit`` bounds the number of histories. Raises ``OSError`` or ``ValueError`` for a trace that cannot be
    read, ``LaunchError`` where a server does not start.
    """
    lines = [line for line in read_trace(trace) if isinstance(line, OpRecord) and line.phase == "workload"]
    scored = [_scored(side, lines, artifacts, limit) for side in (left, right)]
    return compare_scores(lines, scored[0], scored[1], names=(left.name, right.name))


def compare_scores(
    records: Sequence[OpRecord],
    left: Sequence[OpRecord],
    right: Sequence[OpRecord],
    names: tuple[str, str] = ("left", "right"),
) -> Comparison:
    """Compare the scorings that two servers gave of the histories in ``records``."""
    found = _pairs(records, References(left), References(right))
    spreads = [Spread.of(one - other for _, one, other in places) for _, places in found]
    greatest = _typical(spread.greatest for spread in spreads)
    mean = _typical(spread.mean for spread in spreads)
    differences, noise = [], []
    for (one, places), spread in zip(found, spreads, strict=True):
        # A great delta at one token, or smaller ones all along.
        if spread.greatest > allowance(greatest, OUTLIER_TIMES) or spread.mean > allowance(mean, OUTLIER_TIMES):
            differences.append(_difference(one, places, spread))
        else:
            noise += [left - right for _, left, right in places]
    differences.sort(key=lambda one: -one.spread.greatest)
    return Comparison(*names, len(found), Spread.of(noise), greatest, tuple(differences))


def _typical(values: Iterable[float]) -> float:
    return statistics.median_low(list(values) or [0.0])


Places = list[tuple[int, float, float]]


def _pairs(records: Sequence[OpRecord], left: References, right: References) -> list[tuple[Emitted, Places]]:
    """The longest histories that both servers scored, with (position, left, right) of each token."""
    found: list[tuple[Emitted, Places]] = []
    seen: set[tuple[int, ...]] = set()
    for one in sorted(emitted(records), key=lambda one: -len(one.ids)):
        scores = [references.of(one.ids) for references in (left, right)]
        if not all(scores):
            continue
        first, second = scores[0][0], scores[1][0]
        if first.op.input_ids in seen:
            continue
        seen.add(first.op.input_ids)
        places = []
        for position in range(1, len(one.ids)):
            values = [
                at(score.reply.input_logprobs, score.reply.input_start, position) for score in (first, second)
            ]
            if values[0] is not None and values[1] is not None:
                places.append((position, values[0], values[1]))
        if places:
            found.append((one, places))
    return found


def _difference(one: Emitted, places: Places, spread: Spread) -> Difference:
    position, left, right = max(places, key=lambda place: abs(place[1] - place[2]))
    label = one.record.op.label or f"operation {one.record.op.id}"
    return Difference(label, position, one.ids[position], left, right, spread)


def _scored(side: Side, records: Sequence[OpRecord], artifacts: Path, limit: int | None) -> list[OpRecord]:
    engine = make_engine(side.cell.engine)
    plan = replay.replay_plan(records, limit, side.cell.features.context_length)
    if side.url:
        server = Server.attach(engine, side.url, side.cell)
    else:
        server = Server.start(engine, side.cell, python=side.python, artifacts_dir=artifacts)
    with server:
        return Runner(engine, server.base_url, alive=server.alive).run(plan.operations, phase="replay")


# --- the command -----------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvcheck compare``."""
    parser.add_argument("trace", type=Path, help="a trace.jsonl whose histories are scored")
    parser.add_argument("cell", metavar="MATRIX::CELL", help="the configuration that both servers get")
    for name in ("left", "right"):
        parser.add_argument(
            f"--{name}",
            required=True,
            metavar="ENGINE[=PYTHON|URL]",
            help="an engine with the interpreter of its environment, or with the URL of a running server",
        )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", type=int, default=200, help="histories at most (default: 200)")
    parser.add_argument("--artifacts", type=Path, default=Path(".kvcheck"))


def run(chosen: argparse.Namespace) -> int:
    """``kvcheck compare``: 0 where the servers agree, 1 where they differ.

    Raises ``LookupError``, ``OSError`` or ``ValueError`` for arguments that name nothing.
    """
    sides = [_side(chosen, given) for given in (chosen.left, chosen.right)]
    found = compare_trace(
        chosen.trace, sides[0], sides[1], artifacts=chosen.artifacts / "compare", limit=chosen.limit
    )
    print(found.text())
    return 0 if found.agrees else 1


def _side(chosen: argparse.Namespace, given: str) -> Side:
    matrix, _, cell_name = chosen.cell.partition("::")
    engine, _, where = given.partition("=")
    name = next((name for name in ENGINE_NAMES if name == engine), None)
    if name is None:
        raise ValueError(f"expected one of {', '.join(ENGINE_NAMES)}, then =PYTHON or =URL; found {given!r}")
    cells = load(resolve(matrix), engine=name, device=chosen.device, workload_names=parameter_names())
    cell = next((cell for cell in cells if cell.name == cell_name), None)
    if cell is None:
        raise LookupError(
            f"{matrix}: expected a cell of {', '.join(c.name for c in cells)}; found {cell_name!r}"
        )
    is_url = where.startswith(("http://", "https://"))
    return Side(cell, python=sys.executable if is_url or not where else where, url=where if is_url else None)
