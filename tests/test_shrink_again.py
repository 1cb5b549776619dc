"""Recorded plans run again: the verdict of a replay, and failing plans that are kept until they pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from oracle_helpers import facts_of, make_cell, op_record

from pytest_kvcheck.casefiles import case_folder, verdict
from pytest_kvcheck.cells import Case, Cell, WorkloadRef
from pytest_kvcheck.cli import main
from pytest_kvcheck.findings import Finding, gravest
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.settings import Settings
from pytest_kvcheck.shrink import kept
from pytest_kvcheck.shrink.minimise import Minimised, Rate
from pytest_kvcheck.shrink.recorded import recorded
from pytest_kvcheck.shrink.replay import DIVERGED, FAILING, FIXED, replay
from pytest_kvcheck.trace import Reply, TraceHeader, TraceWriter

LEAK = Finding(kind="K03", oracle="conservation", status="leak", headline="40 tokens", pool="full")
CRASH = Finding(kind="K00", oracle="engine_log", status="crash", headline="it died")
UNSURE = Finding(kind="K00", oracle="conservation", status="inconclusive", headline="no gauges")
CELL = make_cell()
RECORDS = [
    op_record("open", 0, session="s"),
    op_record(
        "turn", 1, session="s", after=(0,), input_ids=(11, 12), max_new_tokens=9, reply=Reply(finish="abort")
    ),
    op_record("abort", 2, target=1, shown=3),
]


def write(path: Path, *findings: Finding, cell: Cell = CELL) -> Path:
    header = TraceHeader(cell="c", workload="nth-mid-abort", seed=7, cell_spec=msgspec.to_builtins(cell))
    with TraceWriter(path, header) as trace:
        for record in RECORDS[::-1]:  # they ended in another order than they stand in the plan
            trace.write(record)
        trace.write(verdict(list(findings), 9.0))
    return path


@dataclass
class FakeBench:
    """Answers each run with the next findings of ``script``; the last ones repeat."""

    settings: Settings
    script: list[list[Finding]]
    late: bool = False
    plans: list[Plan | None] = field(default_factory=list)

    def progress(self, text: str) -> None: ...

    def _next(self) -> list[Finding]:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def examine(
        self, case: Case, plan: Plan, folder: Path, *, last: bool = False
    ) -> tuple[CaseFacts, list[Finding]]:
        records = [msgspec.structs.replace(r, shown_at_action=None) if self.late else r for r in RECORDS]
        self.plans.append(plan)
        return facts_of(records), self._next()

    def run(self, case: Case, case_id: str, *, last: bool, plan: Plan | None = None) -> CaseResult:
        findings = self._next()
        self.plans.append(plan)
        path = write(case_folder(self.settings, case_id) / "trace.jsonl", *findings, cell=case.cell)
        return CaseResult(id=case_id, outcome=gravest(findings), findings=findings, trace=str(path))


def bench(tmp_path: Path, *script: list[Finding], **fields: Any) -> Any:
    return FakeBench(Settings(artifacts=tmp_path), list(script), **fields)


def test_a_trace_gives_back_its_plan_cell_and_findings(tmp_path: Path) -> None:
    was = recorded(write(tmp_path / "t.jsonl", LEAK))
    assert was.plan.operations == tuple(record.op for record in RECORDS)
    assert (was.plan.seed, was.findings, was.cell()) == (7, (LEAK,), CELL)


def test_what_killed_a_server_before_its_workload_is_the_plan(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl", TraceHeader(workload="fuzz")) as trace:
        trace.write(op_record("generate", 4_000_011, phase="probe", input_ids=(11,)))
        trace.write(op_record("flush", 8_000_001, phase="drain"))
        trace.write(op_record("generate", 1_000_000, phase="control", input_ids=(12,)))
    assert [op.id for op in recorded(tmp_path / "t.jsonl").plan.operations] == [1_000_000, 4_000_011]


@pytest.mark.parametrize(
    ("before", "runs", "late", "status", "words"),
    [
        ([LEAK], [[], [LEAK]], False, FAILING, "still failing (run 2 of 3)"),
        ([LEAK], [[]], False, FIXED, "fixed: 40 tokens did not come again in 3 runs"),
        ([LEAK], [[CRASH]], False, DIVERGED, "diverged: another fault came instead: K00"),
        ([LEAK], [[UNSURE]], False, DIVERGED, "diverged: the run could not be judged: no gauges"),
        ([LEAK], [[]], True, DIVERGED, "diverged: abort (operation 2) met a running request then"),
        ([], [[]], False, FIXED, "passes, as recorded"),
        ([], [[LEAK]], False, FAILING, "failing now, it passed when it was recorded"),
    ],
)
def test_a_replay_says_fixed_failing_or_diverged(
    before: list[Finding], runs: list[list[Finding]], late: bool, status: int, words: str, tmp_path: Path
) -> None:
    was = recorded(write(tmp_path / "t.jsonl", *before))
    case = Case(was.cell(), WorkloadRef("nth-mid-abort"))
    found = replay(was, case, bench(tmp_path, *runs, late=late), tmp_path / "again", 3)
    assert found.status == status
    assert found.text.startswith(words)


def test_a_file_that_is_no_trace_is_bad_usage_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text("hello\nworld\n")
    assert main(["replay", str(tmp_path / "x.jsonl")]) == 2
    assert "x.jsonl:1: expected a kvcheck trace line" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl" in capsys.readouterr().err
    assert main(["shrink", str(write(tmp_path / "clean.jsonl"))]) == 2
    assert "expected findings to minimise, found none" in capsys.readouterr().err


# --- kept plans ----------------------------------------------------------------------------------------
CASE = Case(CELL, WorkloadRef("nth-mid-abort"))
ID = "m.yaml::c::nth-mid-abort"


def kept_file(tmp_path: Path) -> Path:
    return case_folder(Settings(artifacts=tmp_path), ID) / kept.KEPT


def test_a_failing_plan_is_kept_and_runs_first_until_it_passes(tmp_path: Path) -> None:
    assert kept.run_case(bench(tmp_path, [LEAK]), CASE, ID, last=True).outcome == "leak"
    assert kept_file(tmp_path).exists()

    again = bench(tmp_path, [LEAK])
    result = kept.run_case(again, CASE, ID, last=True)
    assert [plan is not None for plan in again.plans] == [True]
    assert (result.outcome, result.seed) == ("leak", 7)
    assert result.reason.startswith("again, by the plan of ")

    mended = bench(tmp_path, [])
    assert kept.run_case(mended, CASE, ID, last=True).outcome == "passed"
    assert [plan is not None for plan in mended.plans] == [True, False]
    assert not kept_file(tmp_path).exists()


def test_a_kept_plan_of_another_cell_is_left_alone(tmp_path: Path) -> None:
    kept.run_case(bench(tmp_path, [LEAK]), CASE, ID, last=True)
    other = bench(tmp_path, [])
    cell = replace(CELL, features=replace(CELL.features, page_size=16))
    assert kept.run_case(other, replace(CASE, cell=cell), ID, last=True).outcome == "passed"
    assert other.plans == [None]
    assert kept_file(tmp_path).exists()


def test_what_proved_nothing_is_not_kept(tmp_path: Path) -> None:
    kept.run_case(bench(tmp_path, [UNSURE]), CASE, ID, last=True)
    assert not kept_file(tmp_path).exists()


def test_a_failure_is_minimised_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink_case(bench: Any, case: Case, result: CaseResult, budget: Any) -> Minimised:
        write(Path(result.trace).parent / "shrunk" / "trace.jsonl", LEAK)
        plan = recorded(Path(result.trace)).plan
        return Minimised(plan, case.cell, LEAK, Rate(3, 3), Rate(3, 3), 3, 9, 1.0, False, [])

    monkeypatch.setattr(kept, "shrink_case", shrink_case)
    asked = FakeBench(Settings(artifacts=tmp_path, shrink=True), [[LEAK]])
    result = kept.run_case(asked, CASE, ID, last=True)  # type: ignore[arg-type]
    assert result.repro.endswith("shrunk/repro.py")
    assert result.repro in (case_folder(asked.settings, ID) / "result.json").read_text()
    said = result.findings[0].evidence[-1]
    assert said == (
        "By minimising the plan (3 of 3 runs (95 % interval 44% to 100%)), it takes 3 operations: "
        "0: open s; 1: turn s (2 new tokens, 9 wanted); 2: abort of operation 1 at 0 tokens."
    )
