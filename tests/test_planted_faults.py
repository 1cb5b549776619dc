"""Each fault that the reference engine can plant is found and named, with the engine's own check on and off.

Beside each stands its clean twin: the same cell and workload without the fault, which must stay silent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvcheck.cells import Case
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.measure import Row, Subject, reference_subjects
from pytest_kvcheck.reach import REACH
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.settings import Settings
from pytest_kvcheck.shrink.minimise import NO_FAULT

# What only another implementation shows is looked for in test_scorer_oracle.py.
PAIRS = [(name, check) for name, reach in REACH.items() if not reach.scorer for check in reach.checks]


@pytest.fixture(scope="session")
def kinds() -> dict[str, str]:
    """The kind of every fault, by the engine's own word."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest_kvcheck.reference", "--list-faults"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {fault["name"]: fault["kind"] for fault in json.loads(listed.stdout)}


def run(case: Case, folder: Path) -> CaseResult:
    # A stuck server is known after less: it answers in milliseconds when it answers.
    bench = Bench(Settings(artifacts=folder, patience=45.0))
    try:
        return bench.run(case, "planted", last=True)
    finally:
        bench.close()


def subject_of(name: str, check: str, kinds: dict[str, str]) -> Subject:
    (subject,) = reference_subjects({name: kinds[name]}, (check,))
    return subject


def test_every_fault_has_a_row(kinds: dict[str, str]) -> None:
    assert set(kinds) == set(REACH)


@pytest.mark.parametrize(("name", "check"), PAIRS)
def test_a_planted_fault_is_found_and_named(
    name: str, check: str, kinds: dict[str, str], tmp_path: Path
) -> None:
    subject = subject_of(name, check, kinds)
    result = run(Case(subject.cell, subject.workload), tmp_path)
    defects = [finding for finding in result.findings if finding.status not in NO_FAULT]
    row = Row(subject, result.outcome, result.reason, defects)
    assert row.found, result.text()
    assert row.named in ("right", "also"), result.text()
    assert defects[0].next_step, "a finding says what to do next"


def _twins() -> dict[str, tuple[str, str]]:
    """One fault for every distinct twin, by the words that a test's id shows."""
    found: dict[str, tuple[str, str]] = {}
    for name, check in PAIRS:
        reach = REACH[name]
        found.setdefault(f"{reach.cell}-{reach.workload.name}-{check}", (name, check))
    return found


@pytest.mark.parametrize("twin", _twins())
def test_the_clean_twin_is_silent(twin: str, kinds: dict[str, str], tmp_path: Path) -> None:
    name, check = _twins()[twin]
    subject = subject_of(name, check, kinds)
    result = run(Case(subject.twin, subject.workload), tmp_path)
    assert result.outcome == "passed", result.text()
