"""Failing plans are kept beside their case and run first the next time; once they pass they are dropped."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from pytest_kvcheck.casefiles import case_folder
from pytest_kvcheck.cells import Case
from pytest_kvcheck.findings import Finding, some
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.report.results import CaseResult, write_result
from pytest_kvcheck.shrink.case import FOLDER, shrink_case
from pytest_kvcheck.shrink.emit import REPRO
from pytest_kvcheck.shrink.minimise import Budget, Minimised, worst
from pytest_kvcheck.shrink.recorded import recorded

KEPT = "kept.jsonl"
# In a run, one failing case may cost this much more.
PROBES, SECONDS = 100, 300.0
# A finding names so many operations of a minimised plan.
SHOWN = 8


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
    target = worst(result.findings)
    if target is None:
        return result
    trace = Path(result.trace)
    shutil.copyfile(trace, kept)
    if bench.settings.shrink:
        made = shrink_case(bench, case, result, Budget(PROBES, SECONDS))
        if made is not None:
            result = replace(
                result,
                repro=str(trace.parent / FOLDER / REPRO),
                findings=[_attributed(one, made) if one is target else one for one in result.findings],
            )
            if made.cell.launch_key == case.cell.launch_key:
                shutil.copyfile(trace.parent / FOLDER / trace.name, kept)
            write_result(trace.parent, result)
    return result


def _attributed(finding: Finding, made: Minimised) -> Finding:
    """The finding with what its minimisation says of its owner: what is left of the plan is what it takes."""
    what = "; ".join(_words(op) for op in made.plan.operations[:SHOWN])
    more = f" and {made.operations - SHOWN} more" if made.operations > SHOWN else ""
    evidence = (
        f"By minimising the plan ({made.last}), it takes {some(made.operations, 'operation')}: {what}{more}."
    )
    return replace(finding, owner=finding.owner or made.finding.owner, evidence=(*finding.evidence, evidence))


def _words(op: Operation) -> str:
    sizes = f" ({len(op.input_ids)} new tokens, {op.max_new_tokens} wanted)" if op.generates else ""
    aim = f" of operation {op.target} at {op.when_tokens} tokens" if op.target is not None else ""
    return f"{op.id}: {op.kind}{f' {op.session}' if op.session else ''}{aim}{sizes}"
