"""Failing plans are kept beside their case and run first the next time; once they pass they are dropped."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from pytest_kvcheck.cells import Case
from pytest_kvcheck.judge import Bench, case_folder
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.report.results import CaseResult, write_result
from pytest_kvcheck.shrink.case import FOLDER, shrink_case
from pytest_kvcheck.shrink.emit import REPRO
from pytest_kvcheck.shrink.minimise import Budget, worst
from pytest_kvcheck.shrink.recorded import recorded

KEPT = "kept.jsonl"
# In a run, one failing case may cost this much more.
PROBES, SECONDS = 100, 300.0


def run_case(bench: Bench, case: Case, case_id: str, *, last: bool) -> CaseResult:
    """The case's kept plan, where there is one, then its own; a failure is minimised if that is asked for."""
    folder = case_folder(bench.settings, case_id)
    kept = folder / KEPT
    plan = kept_plan(kept, case)
    if plan is not None:
        result = bench.run(case, case_id, last=False, plan=plan)
        if worst(result.findings) is not None:
            reason = f"again, by the plan of {kept}: {result.reason}"
            return _finish(bench, case, replace(result, reason=reason, seed=plan.seed), kept)
        if result.outcome != "error":
            kept.unlink()
    return _finish(bench, case, bench.run(case, case_id, last=last), kept)


def kept_plan(kept: Path, case: Case) -> Plan | None:
    """The plan of a kept trace; None where there is none, or where it was recorded in another cell."""
    try:
        was = recorded(kept)
        return was.plan if was.cell().launch_key == case.cell.launch_key else None
    except (OSError, ValueError):
        return None


def _finish(bench: Bench, case: Case, result: CaseResult, kept: Path) -> CaseResult:
    if worst(result.findings) is None:
        return result
    trace = Path(result.trace)
    shutil.copyfile(trace, kept)
    if bench.settings.shrink:
        made = shrink_case(bench, case, result, Budget(PROBES, SECONDS))
        if made is not None:
            result = replace(result, repro=str(trace.parent / FOLDER / REPRO))
            if made.cell.launch_key == case.cell.launch_key:
                shutil.copyfile(trace.parent / FOLDER / trace.name, kept)
            write_result(trace.parent, result)
    return result
