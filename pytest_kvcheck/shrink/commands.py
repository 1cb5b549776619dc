"""``kvcheck replay`` and ``kvcheck shrink``: a trace on a server that is started, or attached to, for it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pytest_kvcheck.cells import Case
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.report.summary import duration
from pytest_kvcheck.settings import Settings, scorer_of
from pytest_kvcheck.shrink.case import FOLDER, shrink_trace
from pytest_kvcheck.shrink.emit import ISSUE, REPRO
from pytest_kvcheck.shrink.minimise import Budget, Minimised
from pytest_kvcheck.shrink.recorded import Recorded, recorded
from pytest_kvcheck.shrink.replay import case_of, replay

# The exit status for bad usage and for servers that do not start.
NO_RUN = 2


def replay_command(chosen: argparse.Namespace) -> int:
    """Exit status 0: fixed (or passes as recorded), 1: failing, 3: diverged, 2: could not be run.

    Raises ``OSError`` and ``ValueError`` for a file that is no trace.
    """
    was, case = _recorded(chosen)
    with _bench(chosen) as bench:
        try:
            verdict = replay(was, case, bench, bench.settings.artifacts / "replay", max(1, chosen.times))
        except LaunchError as error:
            print(f"kvcheck replay: {error}", file=sys.stderr)
            return NO_RUN
    print(f"result: {verdict.text}")
    print(f"trace of the last run: {shown(bench.settings.artifacts / 'replay' / 'trace.jsonl')}")
    return verdict.status


def shrink_command(chosen: argparse.Namespace) -> int:
    """Exit status 0: minimised, 1: it did not come again, 2: could not be run.

    Raises ``OSError`` and ``ValueError`` for a file that is no trace, or one without a fault.
    """
    _, case = _recorded(chosen)
    with _bench(chosen) as bench:
        try:
            made = shrink_trace(bench, case, _trace(chosen), Budget(chosen.probes, chosen.seconds))
        except LaunchError as error:
            print(f"kvcheck shrink: {error}", file=sys.stderr)
            return NO_RUN
    if made is None:
        print("result: not minimised, the failure did not come again")
        print(f"next: run it more often: kvcheck replay --times 20 {shlex.quote(str(chosen.trace))}")
        return 1
    print(told(made, _trace(chosen).parent / FOLDER))
    return 0


def told(made: Minimised, folder: Path) -> str:
    """What became of a search, for a person: how small, how often it fails, what it is, where its files lie."""
    one = "operation is" if made.operations == 1 else "operations are"
    spent = "; the budget ended the search, a longer one may find less" if made.exhausted else ""
    return "\n".join(
        [
            f"result: {made.operations} of {made.operations_before} {one} left after {made.probes} probes in "
            f"{duration(made.seconds)}{spent}",
            f"the whole plan failed in {made.first}; what is left in {made.last}",
            made.finding.paragraph(),
            f"program: {shown(folder / REPRO)}",
            f"issue:   {shown(folder / ISSUE)}",
            f"trace:   {shown(folder / 'trace.jsonl')}",
        ]
    )


def shown(path: Path) -> str:
    """A path as it can be typed where the command was."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


def _trace(chosen: argparse.Namespace) -> Path:
    path: Path = chosen.trace
    path = path / "trace.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise LookupError(
            f"expected a trace.jsonl or the folder that holds one, found none at {path}; each failed case "
            "names its own behind `trace:`"
        )
    return path


def _recorded(chosen: argparse.Namespace) -> tuple[Recorded, Case]:
    was = recorded(_trace(chosen))
    case = case_of(was)
    cell = case.cell
    if chosen.device:
        cell = replace(cell, device=chosen.device)
    if chosen.model:
        cell = replace(cell, model=replace(cell.model, path=chosen.model))
    return was, replace(case, cell=cell)


@contextmanager
def _bench(chosen: argparse.Namespace) -> Iterator[Bench]:
    settings = Settings(
        url=chosen.url,
        python=chosen.python,
        artifacts=chosen.artifacts.resolve(),
        scorer=scorer_of(getattr(chosen, "scorer", None), Path.cwd()),
    )
    bench = Bench(settings, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        yield bench
    finally:
        bench.close()
