"""``kvcheck doctor``: what is on this machine, and which oracles each engine version has."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence

from pytest_kvcheck import __version__
from pytest_kvcheck.cells import ENGINE_NAMES, Cell, Features, Model, Position
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.launch.gpus import Nvml
from pytest_kvcheck.report.summary import named

_PROBE = Cell("doctor", "doctor", "reference", Model(""), Features(), Position("", 0, 0))


def describe(pythons: Sequence[str]) -> tuple[str, bool]:
    """A page for a person: this machine, then each interpreter with the engines that were found in it; and
    whether each of the interpreters is there.
    """
    missing = False
    lines = [
        f"kvcheck {__version__}, Python {platform.python_version()} ({sys.executable})",
        f"machine: {platform.machine()}, {platform.system()} {platform.release()}",
        f"GPUs: {_gpus()}",
    ]
    for python in dict.fromkeys(pythons):
        lines.append(f"\n{python}")
        if shutil.which(python) is None:
            what = "a file that may not be executed" if os.path.exists(python) else "no such file"
            lines.append(f"  expected an interpreter such as /path/to/venv/bin/python, found {what}")
            missing = True
            continue
        for name in ENGINE_NAMES:
            lines.extend(_engine(name, python))
    return "\n".join(lines), not missing


def _engine(name: str, python: str) -> list[str]:
    engine = make_engine(name)
    try:
        engine.version = engine.installed_version(python)
    except LookupError as error:
        # One of three is what most environments hold: how to get the others is told where one is asked for.
        return [f"  {name}: not in this environment" if "found none" in str(error) else f"  {name}: {error}"]
    rules = engine.rules(_PROBE)
    sessions = "kept by the server" if rules.sessions == "streaming" else "sent again whole by the client"
    lines = [f"  {named(name, engine.version)}", f"    sessions: {sessions}"]
    lines += textwrap.wrap(
        f"checks and gauges: {', '.join(sorted(rules.has))}",
        100,
        initial_indent="    ",
        subsequent_indent="      ",
    )
    lines += [f"    without {what}: {why}" for what, why in sorted(rules.lacks.items())]
    return lines


def _gpus() -> str:
    try:
        return str(Nvml().count)
    except LookupError as error:
        return f"none that can be used: {error}"
