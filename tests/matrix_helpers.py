"""Loading a matrix from text, as the plugin loads one from a file."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.matrix.loader import load
from pytest_kvcheck.matrix.problems import MatrixError

WORKLOADS = {
    "kv-inheritance": frozenset({"turns", "tokens"}),
    "stress-concurrent": frozenset({"rounds"}),
    "pre-abort": frozenset[str](),
}


def cells_of(folder: Path, text: str, **options: Any) -> list[Cell]:
    """The cells of a matrix whose model folder exists."""
    (folder / "tiny").mkdir(exist_ok=True)
    path = folder / "m.yaml"
    path.write_bytes(dedent(text).encode())
    arguments: dict[str, Any] = {"engine": None, "device": "cpu", "workload_names": WORKLOADS, **options}
    return load(path, **arguments)


def problems_of(folder: Path, text: str | bytes, **options: Any) -> list[str]:
    """The problems of a matrix, with the folder left out of the positions."""
    path = folder / "m.yaml"
    (folder / "tiny").mkdir(exist_ok=True)
    path.write_bytes(dedent(text).encode() if isinstance(text, str) else text)
    arguments: dict[str, Any] = {"engine": None, "device": "cpu", "workload_names": WORKLOADS, **options}
    try:
        load(path, **arguments)
    except MatrixError as error:
        return str(error).replace(f"{folder}/", "").splitlines()
    return []
