"""The measurement of the detector: what counts as found, named and alarmed, and what its exit status says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcheck import detection
from pytest_kvcheck.cells import Case
from pytest_kvcheck.cli import main
from pytest_kvcheck.findings import Finding, gravest
from pytest_kvcheck.measure import measure, reference_subjects, table
from pytest_kvcheck.mutants import mutants, subjects_of
from pytest_kvcheck.reach import CELLS, REACH, cell_of
from pytest_kvcheck.report.results import CaseResult

KINDS = {"retract-tail": "K05", "double-free": "K12", "lent-slot-double-count": "K16"}
Said = Callable[[Case], list[Finding]]


def finding(kind: str, *also: str, status: Any = "leak") -> Finding:
    return Finding(kind=kind, oracle="conservation", status=status, headline="x", also=also)


class FakeBench:
    def __init__(self, said: Said) -> None:
        self.said, self.cases = said, list[tuple[str, bool]]()

    def __call__(self, settings: Any) -> FakeBench:
        return self

    def run(self, case: Case, case_id: str, *, last: bool) -> CaseResult:
        self.cases.append((case_id, last))
        findings = self.said(case)
        return CaseResult(id=case_id, outcome=gravest(findings), findings=findings)

    def close(self) -> None: ...


def right(case: Case) -> list[Finding]:
    return [finding(KINDS[name]) for name in case.cell.plant if name in KINDS]


def run(said: Said, **fields: Any) -> Any:
    bench: Any = FakeBench(said)
    return measure(reference_subjects(KINDS, ("on", "off")), bench, **fields), bench


def test_all_found_and_silent_twins_are_good() -> None:
    measured, bench = run(right)
    assert measured.good
    # A fault of the check itself is there only while the check is on.
    assert [(row.subject.name, row.subject.check) for row in measured.rows] == [
        ("retract-tail", "on"),
        ("double-free", "on"),
        ("lent-slot-double-count", "on"),
        ("retract-tail", "off"),
        ("double-free", "off"),
    ]
    assert measured.summary.startswith(
        "5 of 5 found; kind right in 5, among those named in 0, wrong in 0; 0 alarms"
    )
    twins = [case for case in bench.cases if case[0].startswith("clean-")]
    assert len(twins) == measured.twins == 5
    assert all(last for _, last in twins), "each has a launch key of its own here"


def test_a_missed_fault_and_a_loud_twin_are_not_good() -> None:
    missed, _ = run(lambda case: [] if "double-free" in case.cell.plant else right(case))
    assert not missed.good
    assert "| **missed** (passed) |" in table(missed)
    loud, _ = run(lambda case: right(case) or [finding("K01")])
    assert not loud.good
    assert len(loud.alarms) == 5
    assert "- **false alarm** clean-on::" in table(loud)


def test_what_proved_nothing_did_not_find_anything() -> None:
    measured, _ = run(lambda case: [finding("K00", status="unexercised")] if case.cell.plant else [])
    assert not any(row.found for row in measured.rows)


@pytest.mark.parametrize(
    ("said", "named"),
    [(finding("K05"), "right"), (finding("K01", "K05"), "also"), (finding("K01"), "no")],
)
def test_how_well_a_kind_is_named(said: Finding, named: str) -> None:
    measured, _ = run(lambda case: [said] if case.cell.plant else [])
    assert {row.named for row in measured.rows if row.subject.name == "retract-tail"} == {named}


def test_plans_go_on_until_a_fault_is_found_and_to_the_end_for_a_twin() -> None:
    measured, bench = run(lambda case: right(case) if case.repeat == 2 else [], plans=4)
    assert measured.good
    assert {row.plans for row in measured.rows} == {3}
    assert len(bench.cases) == 5 * 3 + 5 * 4
    alarmed, bench = run(lambda case: right(case) or ([finding("K01")] if case.repeat == 1 else []), plans=3)
    assert len(alarmed.alarms) == 5
    twins = [last for name, last in bench.cases if name.startswith("clean-")]
    assert twins == [False, False, True] * 5, "a server is kept for all plans of a twin"


def test_an_interrupt_keeps_what_was_found_by_then() -> None:
    def said(case: Case) -> list[Finding]:
        if "double-free" in case.cell.plant:
            raise KeyboardInterrupt
        return right(case)

    measured, _ = run(said)
    assert not measured.good
    assert [row.subject.name for row in measured.rows] == ["retract-tail"]
    assert measured.summary.startswith("1 of 1 found")
    assert measured.summary.endswith(", then interrupted")


def test_one_workload_may_look_for_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    subjects = reference_subjects(KINDS, ("on", "off"), "fuzz")
    assert {subject.workload.name for subject in subjects} == {"fuzz"}
    assert main(["faults", "--measure", "--workload", "fuz"]) == 2
    assert "expected one of" in capsys.readouterr().err


def test_sizes_stand_in_the_table() -> None:
    measured, _ = run(right, size=lambda case, result: 4)
    # Two with the check off, and the one that is there only with it on.
    assert table(measured).count("4 operations") == 3


def test_the_command_prints_the_summary_last_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = FakeBench(lambda case: [finding("K05")] if case.cell.plant else [])
    monkeypatch.setattr(detection, "Bench", bench)
    page = tmp_path / "detection.md"
    arguments = ["faults", "--measure", "--only", "retract-tail", "--artifacts", str(tmp_path)]
    assert main([*arguments, "--output", str(page)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 of 2 found; kind right in 2")
    assert page.read_text().startswith("# Detection\n")
    assert page.read_text().endswith(last + "\n")
    bench.said = lambda case: []
    assert main(arguments) == 1
    assert main([*arguments, "--only", "nonsense"]) == 2
    assert "found 'nonsense'" in capsys.readouterr().err
    assert main(["faults", "--measure", "--engine", "vllm"]) == 2


def test_every_fault_of_the_reference_engine_has_a_row() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pytest_kvcheck.reference", "--list-faults"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {fault["name"] for fault in json.loads(listed.stdout)} == set(REACH)
    assert {reach.cell for reach in REACH.values()} <= set(CELLS)
    with pytest.raises(LookupError, match=r"found none for \['new-fault'\]"):
        reference_subjects({"new-fault": "K01"}, ("on",))


def test_a_planted_cell_and_its_twin_differ_in_the_fault_only() -> None:
    planted, twin = cell_of("swa", plant=("retract-tail",), silent=True), cell_of("swa", silent=True)
    assert replace(planted, plant=()) == twin
    assert planted.launch_key != twin.launch_key
    assert not twin.features.strict


# --- mutants of other engines --------------------------------------------------------------------------
TABLE = """
from pytest_kvcheck.mutants import Mutant
SUBJECTS = [
    Mutant("kept", frozenset({"K03"}), {"page_size": 16}, {"stress-concurrent": {"turns": 2}}, {"M": "kept"},
           {"path": "org/model"}, checks=("on", "off")),
]
"""


def test_a_table_of_mutants_becomes_subjects(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text(TABLE)
    found = subjects_of(mutants(path), "sglang", "cpu", ("on", "off"), tmp_path / "cells")
    assert [(one.name, one.check, one.cell.features.strict) for one in found] == [
        ("kept", "on", True),
        ("kept", "off", False),
    ]
    one = found[0]
    assert (one.cell.engine, one.cell.env, one.twin.env) == ("sglang", {"M": "kept"}, {})
    assert (one.workload.name, one.workload.params) == ("stress-concurrent", {"turns": 2})


def test_a_file_without_a_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(LookupError, match=r"empty.py: expected SUBJECTS"):
        mutants(tmp_path / "empty.py")
    with pytest.raises(FileNotFoundError, match="found no file"):
        mutants(tmp_path / "gone.py")
