"""Shrink quality on the reference engine: a planted fault ends as a handful of operations and a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvcheck.cells import Case
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.reach import REACH, cell_of
from pytest_kvcheck.settings import Settings
from pytest_kvcheck.shrink.case import shrink_case

GREATEST = 6
# With every change: a wrong count, a wrong log-prob and a leak. The others' searches take minutes.
QUICK = ("cached-tokens-off-by-one", "stale-kv-slot", "lock-never-released")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly)
        for name, reach in REACH.items()
        if "off" in reach.checks and not reach.scorer
    ],
)
def test_a_planted_fault_becomes_a_few_operations(fault: str, tmp_path: Path) -> None:
    reach = REACH[fault]
    case = Case(cell_of(reach.cell, plant=(fault,), silent=True), reach.workload)
    bench = Bench(Settings(artifacts=tmp_path, budget=4.0))
    try:
        result = bench.run(case, f"{fault}::{reach.cell}", last=True)
        assert result.findings, result.reason
        made = shrink_case(bench, case, result)
        assert made is not None
        assert made.operations <= GREATEST, made.plan.operations
        assert made.operations < made.operations_before
        assert made.last.seen > 0
        program = Path(result.trace).parent / "shrunk" / "repro.py"
        url = bench.bed_for(made.cell, "repro").server.base_url
        done = subprocess.run(
            [sys.executable, str(program), url], capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 1, done.stdout + done.stderr
    finally:
        bench.close()
