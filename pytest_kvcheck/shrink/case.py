"""A failed case on the bench: confirmed, minimised, and written down for whoever is to mend it."""

from __future__ import annotations

import shutil
from pathlib import Path

from pytest_kvcheck.cells import Case
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.oracles.logprobs import measure
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.shrink.emit import Launch, emit
from pytest_kvcheck.shrink.minimise import Budget, Minimised, Rate, minimise, same, worst
from pytest_kvcheck.shrink.probe import BenchProbe
from pytest_kvcheck.shrink.recorded import recorded

FOLDER = "shrunk"


def shrink_case(bench: Bench, case: Case, result: CaseResult, budget: Budget | None = None) -> Minimised | None:
    """Minimise what ``result`` found; ``shrunk/`` beside its trace then holds ``trace.jsonl``, ``repro.py`` and
    ``issue.md``. None where nothing was found, or where it did not come again; or where only another
    implementation shows it, which a program that asks the server alone cannot.
    """
    target = worst(result.findings)
    if target is None or target.oracle == "scorer" or not result.trace:
        return None
    return shrink_trace(bench, case, Path(result.trace), budget)


def shrink_trace(bench: Bench, case: Case, trace: Path, budget: Budget | None = None) -> Minimised | None:
    """As :func:`shrink_case`, from a trace with its verdict.

    Raises ``ValueError`` where the trace holds no verdict or no fault, or one that only another implementation
    shows.
    """
    was = recorded(trace)
    target = worst(was.findings or ())
    if target is None:
        raise ValueError(f"{trace}: expected findings to minimise, found none")
    if target.oracle == "scorer":
        raise ValueError(
            f"{trace}: expected a finding that the server alone shows, found one against another "
            "implementation; `kvcheck replay --scorer transformers` runs it again"
        )
    folder = trace.parent / FOLDER
    probe = BenchProbe(bench, case, target, folder / "probe")
    try:
        made = minimise(was.plan, case.cell, target, probe, budget=budget, progress=bench.progress)
        if made is not None:
            _write(bench, Case(made.cell, case.workload, case.repeat), made, folder)
    finally:
        bench.close()  # its server was measured for this search only
        shutil.rmtree(probe.folder, ignore_errors=True)
    return made


def _write(bench: Bench, case: Case, made: Minimised, folder: Path) -> None:
    """Run the minimised plan once more, patiently and before every oracle, and write the program from that."""
    facts, findings = bench.examine(case, made.plan, folder)
    hit = next((finding for finding in findings if same(finding, made.finding)), None)
    made.finding = hit or made.finding
    made.last = Rate(made.last.seen + (hit is not None), made.last.tried + 1)
    header = recorded(folder / "trace.jsonl").header
    emit(
        folder,
        made,
        Launch.of(header),
        tolerance=measure(facts.records).limit,
        cached=facts.promises.expected_cached,
    )
