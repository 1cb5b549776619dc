"""Finding and loading matrix files.

A plain pytest run asks here about YAML files, so the parser and the validation are imported by ``load`` only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pytest_kvcheck.cells import Cell, DeviceName, EngineName
from pytest_kvcheck.matrix.problems import MatrixError, MatrixProblem, nearest

__all__ = ["MatrixError", "is_matrix_file", "load", "resolve", "shipped"]

SUFFIXES = (".yaml", ".yml")
_HEAD_BYTES = 4096
_PREAMBLE = re.compile(r"\s*(#.*)?$|---\s*(#.*)?$|%")
_OWN_KEY = re.compile(r"""(---\s*)?\{?\s*["']?kvcheck["']?\s*:(\s|$)""")


def is_matrix_file(path: Path) -> bool:
    """Whether the first key of a YAML file is ``kvcheck``. Reads a few kilobytes; False where it cannot."""
    if path.suffix not in SUFFIXES:
        return False
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace")
    except OSError:
        return False
    lines = (line for line in head.splitlines() if not _PREAMBLE.match(line))
    return bool(_OWN_KEY.match(next(lines, "")))


def shipped() -> dict[str, Path]:
    """The matrices that come with the package, by bare name: in the wheel, else in the checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "matrices", package.parent / "matrices"):
        if found := {path.stem: path for path in sorted(folder.glob("*.yaml"))}:
            return found
    return {}


def resolve(name_or_path: str | Path) -> Path:
    """The file that a name on the command line means: an existing file, or a matrix that ships.

    Raises ``LookupError`` where there is neither, naming what ships and what is nearest.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    matrices = shipped()
    text = str(name_or_path)
    if text in matrices:
        return matrices[text]
    bare = path.stem if path.suffix in SUFFIXES else text
    found = f"a folder, '{text}'" if path.is_dir() else f"no file '{text}'"
    hint = nearest(bare, matrices)
    raise LookupError(
        f"expected a matrix file or the name of one that ships ({', '.join(matrices) or 'none do'}), "
        f"found {found}" + (f"; {hint}" if hint else "")
    )


def load(
    path: Path,
    *,
    engine: EngineName | None,
    device: DeviceName,
    workload_names: Mapping[str, frozenset[str]],
    plant: tuple[str, ...] = (),
    silent: bool = False,
) -> list[Cell]:
    """The cells of a matrix, in the order of the file, for one engine (None: the file's own).

    ``workload_names`` gives the valid parameters of every workload; ``plant`` names faults to plant in the
    reference engine; ``silent`` turns the engine's own strict check off in every cell. Cells of equal files
    and arguments are equal in every process. Raises :class:`MatrixError` with all problems of the file.
    """
    from pytest_kvcheck.matrix.build import Context, build_cells
    from pytest_kvcheck.matrix.document import read
    from pytest_kvcheck.matrix.validate import check_version, validated

    problems: list[MatrixProblem] = []
    document = read(path, problems.append)
    check_version(document, problems.append)
    form = validated(document, problems.append)
    context = Context(document, path.parent, device, workload_names, plant, silent, problems.append)
    cells = build_cells(form, engine, context)
    if problems:
        # One wrong setting in the defaults or on an axis is one problem, in however many cells it shows.
        unique = {(problem.at, problem.expected): problem for problem in reversed(problems)}.values()
        raise MatrixError(sorted(unique, key=lambda problem: (problem.at.line, problem.at.column)))
    return cells
