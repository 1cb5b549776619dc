"""A matrix as pytest nodes: the file, a collector a cell, an item a case."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_kvcheck.cells import Case, Cell
from pytest_kvcheck.plugin import SESSION_PLUGIN
from pytest_kvcheck.report.results import CaseResult

if TYPE_CHECKING:
    from _pytest._code.code import ExceptionInfo

    from pytest_kvcheck.session import KvSession
    from pytest_kvcheck.settings import Settings


def kv_session(config: pytest.Config) -> KvSession:
    """The plugin's session object; it exists as soon as a matrix was named."""
    session: KvSession = config.pluginmanager.get_plugin(SESSION_PLUGIN)  # type: ignore[assignment]
    return session


class CaseFailed(Exception):
    """Carries the result of a case that did not pass to the report."""

    def __init__(self, result: CaseResult) -> None:
        super().__init__(result.reason)
        self.result = result


def check_plants(settings: Settings) -> None:
    """Refuse faults that cannot be planted now; a server would say it only when it starts.

    Raises ``pytest.UsageError``.
    """
    if not settings.plant:
        return
    from pytest_kvcheck.matrix.problems import nearest
    from pytest_kvcheck.reach import REACH

    for name in settings.plant:
        if name not in REACH:
            hint = nearest(name, REACH) or "`kvcheck faults` lists them"
            raise pytest.UsageError(
                f"--kvcheck-plant: expected a fault of the reference engine, found {name!r}; {hint}"
            )
    if settings.url is not None:
        raise pytest.UsageError(
            "--kvcheck-plant: a fault is planted when a server starts, found --kvcheck-url; give the fault to "
            "the server instead: kvcheck serve --plant FAULT"
        )
    if settings.engine not in (None, "reference"):
        raise pytest.UsageError(
            "--kvcheck-plant: only the reference engine has faults to plant, found --kvcheck-engine "
            f"{settings.engine}"
        )


def load_cells(path: Path, config: pytest.Config) -> list[Cell]:
    """The cells of a matrix under the options of this run. Raises ``MatrixError``."""
    from pytest_kvcheck.matrix.loader import load
    from pytest_kvcheck.matrix.problems import MatrixError, MatrixProblem
    from pytest_kvcheck.workloads import parameter_names

    settings = kv_session(config).settings
    cells = load(
        path,
        engine=settings.engine,
        device=settings.device,
        workload_names=parameter_names(),
        plant=settings.plant,
        silent=settings.silent,
    )
    if settings.plant:
        expected = "engine: reference, the only one that takes --kvcheck-plant"
        hint = "add --kvcheck-engine reference"
        wrong = [
            MatrixProblem(cell.at, expected, repr(cell.engine), hint)
            for cell in cells
            if cell.engine != "reference"
        ]
        if wrong:
            raise MatrixError(wrong[:1])
    return cells


def cells_of_marker(marker: pytest.Mark, config: pytest.Config) -> list[Cell]:
    """The cells that ``@pytest.mark.kvcheck(matrix=..., cells=[...])`` names; all of them without ``cells``.

    Raises ``pytest.UsageError`` where the matrix or a cell does not exist.
    """
    from pytest_kvcheck.matrix.loader import MatrixError, resolve

    wanted = marker.kwargs.get("cells")
    try:
        cells = load_cells(resolve(marker.kwargs.get("matrix", "llama")), config)
    except (MatrixError, LookupError) as error:
        raise pytest.UsageError(f"@pytest.mark.kvcheck: {error}") from error
    unknown = sorted(set(wanted or ()) - {cell.name for cell in cells})
    if unknown:
        known = ", ".join(cell.name for cell in cells)
        raise pytest.UsageError(f"@pytest.mark.kvcheck: expected cells among {known}, found {unknown[0]!r}")
    return [cell for cell in cells if wanted is None or cell.name in wanted]


class MatrixFile(pytest.File):
    """A matrix file: its children are its cells, in the order of the file."""

    def collect(self) -> Iterable[CellNode]:
        from pytest_kvcheck.matrix.loader import MatrixError

        try:
            cells = load_cells(self.path, self.config)
        except MatrixError as error:
            raise self.CollectError(str(error)) from error
        for cell in cells:
            yield CellNode.from_parent(self, name=cell.name, cell=cell)


class CellNode(pytest.Collector):
    """One cell: ``matrices/llama.yaml::page-256`` names all of its cases."""

    def __init__(self, *, cell: Cell, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cell = cell

    def collect(self) -> Iterable[KvItem]:
        repeats = kv_session(self.config).settings.repeat
        for workload in self.cell.workloads:
            for repeat in range(repeats):
                case = Case(self.cell, workload, repeat)
                yield KvItem.from_parent(self, name=case.name.partition("::")[2], case=case)


class KvItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.result: CaseResult | None = None

    def runtest(self) -> None:
        self.result = kv_session(self.config).run(self)
        if self.result.outcome == "skipped":
            pytest.skip(self.result.reason)
        if self.result.outcome != "error" and (stale := self.result.stale()):
            gone = stale[0]
            raise CaseFailed(
                replace(
                    self.result,
                    reason=f"expected the known {gone.kind} until {gone.until} ({gone.page}), found it gone or "
                    "expired; remove the `known` entry from the matrix, or renew it with a new date",
                )
            )
        if self.result.expected:
            first = next(k for k in self.result.known if any(map(k.covers, self.result.findings)))
            pytest.xfail(f"known {first.kind} until {first.until}: see {first.page}")
        if self.result.outcome != "passed":
            raise CaseFailed(self.result)

    def repr_failure(self, excinfo: ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CaseFailed):
            return excinfo.value.result.text()
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.case.cell.at.line - 1, f"{self.case.cell.name}::{self.name}"
