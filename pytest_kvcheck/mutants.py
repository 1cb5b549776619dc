"""Faults of engines that are not ours, to measure the detector with: a table in a file beside the tests.

The file is a Python module with ``SUBJECTS``: a list of :class:`Mutant`. An engine's source stays untouched on
disk; a mutant's environment has it changed while it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_kvcheck.cells import Cell, DeviceName, EngineName
from pytest_kvcheck.matrix.loader import load
from pytest_kvcheck.measure import Subject
from pytest_kvcheck.workloads import parameter_names


@dataclass(frozen=True)
class Mutant:
    """``kinds`` are right for it; ``features``, ``model``, ``workload``: as in a matrix; ``env`` plants it."""

    name: str
    kinds: frozenset[str]
    features: Mapping[str, Any]
    workload: str | Mapping[str, Any]
    env: Mapping[str, str]
    model: Mapping[str, str]
    checks: tuple[str, ...] = ("off",)
    twin_env: Mapping[str, str] = field(default_factory=dict)


def mutants(path: Path) -> list[Mutant]:
    """The table of a file. Raises ``LookupError`` where it has none, ``OSError`` where it cannot be read."""
    if not path.is_file():
        raise FileNotFoundError(f"--mutants: expected a Python file with SUBJECTS, found no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The table may build on its neighbours.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    found = getattr(module, "SUBJECTS", None)
    if not isinstance(found, list) or not all(isinstance(one, Mutant) for one in found):
        raise LookupError(f"{path}: expected SUBJECTS, a list of pytest_kvcheck.mutants.Mutant")
    return found


def subjects_of(
    table: Sequence[Mutant], engine: EngineName, device: DeviceName, checks: Iterable[str], folder: Path
) -> list[Subject]:
    """Mutants as subjects; the matrices that describe their cells are written into ``folder``."""
    found = []
    for check in checks:
        for one in table:
            if check in one.checks:
                cell = _cell(one, one.env, engine, device, check, folder)
                twin = _cell(one, one.twin_env, engine, device, check, folder)
                found.append(Subject(one.name, one.kinds, check, cell, twin, cell.workloads[0]))
    return found


def _cell(
    one: Mutant, env: Mapping[str, str], engine: EngineName, device: DeviceName, check: str, folder: Path
) -> Cell:
    matrix = {
        "kvcheck": 1,
        "family": "mutants",
        "engine": engine,
        "model": dict(one.model),
        "cells": {one.name: {**one.features, "env": dict(env)}},
        "workloads": [one.workload],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{one.name}.yaml"
    path.write_text(json.dumps(matrix), encoding="utf-8")  # JSON is YAML
    return load(path, engine=engine, device=device, workload_names=parameter_names(), silent=check == "off")[0]
