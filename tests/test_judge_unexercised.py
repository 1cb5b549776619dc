"""A case that proved nothing gets a second chance on a new server, and no more than one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_kvcheck.cells import Case, WorkloadRef
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.reach import cell_of
from pytest_kvcheck.settings import Settings


class Losing(Bench):
    """Loses the race of its first runs."""

    def __init__(self, settings: Settings, losses: int) -> None:
        super().__init__(settings)
        self.losses, self.pids = losses, list[int]()

    def examine(self, case: Case, plan: Plan, folder: Path, **fields: Any) -> tuple[CaseFacts, list[Finding]]:
        self.pids.append(self.bed_for(case.cell, case.name).server.pid or 0)
        facts, findings = super().examine(case, plan, folder, **fields)
        if len(self.pids) <= self.losses:
            findings = [Finding(kind="K00", oracle="exercise", status="unexercised", headline="not seen")]
        return facts, findings


@pytest.mark.parametrize(("losses", "outcome"), [(1, "passed"), (2, "unexercised")])
def test_an_unexercised_case_runs_once_more(losses: int, outcome: str, tmp_path: Path) -> None:
    bench = Losing(Settings(artifacts=tmp_path, budget=1.0), losses)
    try:
        result = bench.run(Case(cell_of("plain"), WorkloadRef("kv-inheritance")), "x", last=True)
    finally:
        bench.close()
    assert result.outcome == outcome, result.text()
    assert len(set(bench.pids)) == len(bench.pids) == 2
