"""``kvcheck doctor``: what is on this machine, and which oracles each engine version has."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from pytest_kvcheck import __version__
from pytest_kvcheck.cells import ENGINE_NAMES, Cell, Features, Model, Position
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.launch.gpus import Nvml

_PROBE = Cell("doctor", "doctor", "reference", Model(""), Features(), Position("", 0, 0))


def describe(pythons: Sequence[str]) -> str:
    """A page for a person: this machine, then each interpreter with the engines that were found in it."""
    lines = [
        f"kvcheck {__version__}, Python {platform.python_version()} ({sys.executable})",
        f"machine: {platform.machine()}, {platform.system()} {platform.release()}",
        f"GPUs: {_gpus()}",
    ]
    for python in dict.fromkeys(pythons):
        lines.append(f"\n{python}")
        for name in ENGINE_NAMES:
            lines.extend(_engine(name, python))
    return "\n".join(lines)


def _engine(name: str, python: str) -> list[str]:
    engine = make_engine(name)
    try:
        engine.version = engine.installed_version(python)
    except LookupError as error:
        return [f"  {name}: not here. {error}"]
    rules = engine.rules(_PROBE)
    lines = [f"  {name} {engine.version}: sessions {rules.sessions}"]
    lines += [f"    has {what}" for what in sorted(rules.has)]
    lines += [f"    lacks {what}: {why}" for what, why in sorted(rules.lacks.items())]
    return lines


def _gpus() -> str:
    try:
        return str(Nvml().count)
    except LookupError as error:
        return f"none usable ({error})"
