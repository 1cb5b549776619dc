"""A failed case on the bench: confirmed, minimised, and written down for whoever is to mend it."""

from __future__ import annotations

from pathlib import Path

from pytest_kvcheck.cells import Case
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.shrink.emit import emit
from pytest_kvcheck.shrink.minimise import Budget, Minimised, minimise, worst
from pytest_kvcheck.shrink.probe import BenchProbe
from pytest_kvcheck.shrink.recorded import recorded

FOLDER = "shrunk"


def shrink_case(bench: Bench, case: Case, result: CaseResult, budget: Budget | None = None) -> Minimised | None:
    """Minimise what ``result`` found; ``shrunk/`` beside its trace then holds ``trace.jsonl``, ``repro.py`` and
    ``issue.md``. None where nothing was found, or where it did not come again.
    """
    target = worst(result.findings)
    if target is None or not result.trace:
        return None
    return shrink_trace(bench, case, Path(result.trace), budget)


def shrink_trace(bench: Bench, case: Case, trace: Path, budget: Budget | None = None) -> Minimised | None:
    """As :func:`shrink_case`, from a trace with its verdict.

    Raises ``ValueError`` where the trace holds no verdict or no fault.
    """
    was = recorded(trace)
    target = worst(was.findings or ())
    if target is None:
        raise ValueError(f"{trace}: expected findings to minimise, found none")
    folder = trace.parent / FOLDER
    probe = BenchProbe(bench, case, target, folder / "probe")
    made = minimise(was.plan, case.cell, target, probe, budget=budget, progress=bench.progress)
    if made is not None:
        bench.examine(_with_cell(case, made), made.plan, folder, focus=probe.focus)
        emit(folder, made)
    return made


def _with_cell(case: Case, made: Minimised) -> Case:
    return Case(made.cell, case.workload, case.repeat)
