"""``kvcheck faults --measure``: how the reference engine's faults, or an engine's mutants, are found."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_kvcheck.cells import Case
from pytest_kvcheck.findings import some
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.measure import Size, Subject, measure, reference_subjects, table
from pytest_kvcheck.mutants import mutants, subjects_of
from pytest_kvcheck.reach import REACH
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.settings import Settings, scorer_of
from pytest_kvcheck.shrink.case import shrink_case
from pytest_kvcheck.workloads import WORKLOADS

_HEAD = """# Detection{alone}

Every fault that the reference engine can plant, found by kvcheck or not, with the engine's own memory check on
and off. `named` says whether the finding's first kind is the planted one (right), or it stands among the kinds
that fit the observation too (also). `plans` is how many plans of the workload it took, `requests` and `seconds`
are those of the load until the verdict; `repro` is the size of the minimised plan. Made on {machine}, by

    {command}
"""


def measure_command(faults: Sequence[Mapping[str, str]], chosen: argparse.Namespace) -> int:
    """1 where a fault was missed or a clean twin raised an alarm; its last line is the summary.

    ``faults`` are the reference engine's. Raises ``LookupError`` and ``OSError`` for bad usage.
    """
    subjects = _subjects(faults, chosen)
    bench = Bench(
        Settings(
            budget=chosen.budget,
            # A stuck server is known after less where it answers in milliseconds when it answers.
            patience=45.0 if chosen.engine is None else None,
            python=chosen.python,
            device=chosen.device,
            artifacts=chosen.artifacts.resolve(),
            scorer=scorer_of(chosen.scorer, Path.cwd()),
        )
    )
    size = _sizes(bench) if chosen.shrink else None
    try:
        measured = measure(
            subjects, bench, plans=chosen.plans, size=size, progress=lambda text: print(text, flush=True)
        )
    finally:
        bench.close()
    text = table(measured)
    if chosen.output is not None:
        cores = some(len(os.sched_getaffinity(0)), "core")
        head = _HEAD.format(
            alone=f" by `{chosen.workload}` alone" if chosen.workload else "",
            machine=f"{cores} ({platform.system()} {platform.machine()}, Python {platform.python_version()})",
            command=shlex.join(["kvcheck", *sys.argv[1:]]),
        )
        chosen.output.write_text(f"{head}\n{text}\n{measured.summary}\n", encoding="utf-8")
    print(f"\n{text}\n{measured.summary}")
    return 0 if measured.good else 1


def _subjects(faults: Sequence[Mapping[str, str]], chosen: argparse.Namespace) -> list[Subject]:
    checks = ("on", "off") if chosen.check == "both" else (chosen.check,)
    if chosen.engine is None:
        if chosen.workload not in (None, *WORKLOADS):
            raise LookupError(f"--workload: expected one of {', '.join(WORKLOADS)}, found {chosen.workload!r}")
        kinds = {
            fault["name"]: fault["kind"]
            for fault in faults
            # An engine that agrees with itself is not to be caught by asking it again.
            if chosen.scorer or fault["name"] not in REACH or not REACH[fault["name"]].scorer
        }
        found = reference_subjects(kinds, checks, chosen.workload)
    elif chosen.mutants is None:
        raise LookupError(f"--engine {chosen.engine}: expected --mutants FILE with the faults to build into it")
    else:
        folder = chosen.artifacts.resolve() / "mutants"
        found = subjects_of(mutants(chosen.mutants), chosen.engine, chosen.device, checks, folder)
    names = list(dict.fromkeys(subject.name for subject in found))
    unknown = sorted(set(chosen.only) - set(names))
    if unknown:
        raise LookupError(f"--only: expected one of {', '.join(names)}, found {unknown[0]!r}")
    return [subject for subject in found if not chosen.only or subject.name in chosen.only]


def _sizes(bench: Bench) -> Size:
    def size(case: Case, result: CaseResult) -> int | None:
        made = shrink_case(bench, case, result)
        return None if made is None else made.operations

    return size
