"""Probes of a minimisation: any plan in any cell, on a server that is kept as long as it can be trusted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_kvcheck.cells import Case, Cell
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.operations import Plan

# Oracles that judge what is seen anyway.
FREE = frozenset({"conservation", "engine_log", "session_arithmetic", "protocol"})


class BenchProbe:
    """Runs plans on a bench's servers; the trace of the last one that failed lies in ``folder``.

    Only the oracles that may see the fault again are asked: the others cost most of a probe's time.
    """

    def __init__(self, bench: Bench, case: Case, target: Finding, folder: Path) -> None:
        self.bench, self.case, self.folder = bench, case, folder
        self.focus = focus_of(target)

    def __call__(self, plan: Plan, cell: Cell) -> list[Finding]:
        try:
            _, findings = self.bench.examine(replace(self.case, cell=cell), plan, self.folder, focus=self.focus)
        except LaunchError:
            return []  # a cell that the engine cannot start is no reproduction
        return findings


def focus_of(target: Finding) -> frozenset[str] | None:
    """The oracles that a minimisation needs for this finding; None: all of them."""
    if target.status in ("crash", "residue"):
        return None
    focus = FREE | {target.oracle}
    if target.kind == "K11" or "K11" in target.also:
        focus |= {"rows"}
    if target.status == "mismatch" and target.oracle not in FREE - {"engine_log"}:
        focus |= {"logprobs"}
    return focus
