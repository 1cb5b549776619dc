"""What a case leaves behind: its folder, the ends of its trace, the command that runs it again."""

from __future__ import annotations

import hashlib
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pytest_kvcheck.cells import Case
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.matrix.loader import shipped
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.rest import Bed
from pytest_kvcheck.settings import Settings
from pytest_kvcheck.trace import VERDICT, Note, TraceHeader


def again(settings: Settings, case: Case, case_id: str) -> str:
    """The command that runs this case again with the same plan, to be typed where pytest was started."""
    matrix = Path(case.cell.at.file)
    if matrix.is_absolute():  # outside of where pytest was started: its node id names nothing there
        name = matrix.stem if shipped().get(matrix.stem) == matrix else str(matrix)
        what = f"--kvcheck-matrix={name}::{case.cell.name}::{case.workload.name}"
    else:
        what = case_id.partition("#")[0]
    words = ["pytest", "-p", "kvcheck", what, f"--kvcheck-engine={case.cell.engine}"]
    given = {
        "url": settings.url,
        "python": settings.python,
        "device": None if case.cell.device == "cpu" else case.cell.device,
        "seed": settings.seed or None,
        "repeat": case.repeat + 1 if case.repeat else None,
        "budget": settings.budget,
        "patience": settings.patience,
        "scorer": settings.scorer,
    }
    for name, value in given.items():
        # With "=": pytest takes a path behind a space for a test's place, and looks for its root folder there.
        told = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--kvcheck-{name}={told}"] if value else []
    words += [f"--kvcheck-plant={fault}" for fault in case.cell.plant]
    return shlex.join([*words, *(["--kvcheck-silent"] if settings.silent else [])])


def trace_header(bed: Bed, case: Case, plan: Plan) -> TraceHeader:
    """The first line of a case's trace: all that it takes to run the plan again, the cell included."""
    engine, cell = bed.server.engine, case.cell
    return TraceHeader(
        family=cell.family,
        cell=cell.name,
        workload=case.workload.name,
        seed=plan.seed,
        engine=engine.name,
        engine_version=engine.version,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=list(bed.server.argv),
        env=dict(bed.server.env),
        model=cell.model.path,
        params=dict(plan.params),
        must_exercise=list(plan.must_exercise),
        cell_spec=msgspec.to_builtins(cell),
    )


def verdict(findings: list[Finding], t: float) -> Note:
    """The last line of a case's trace: what was found, so that a replay can tell fixed from failing."""
    return Note(t=t, what=VERDICT, data={"findings": msgspec.to_builtins(findings)})


def case_folder(settings: Settings, case_id: str) -> Path:
    """Where the trace, the gauges and the result of a case lie."""
    return settings.artifacts / _slug(case_id)


def _slug(case_id: str) -> str:
    """A folder name that is legal and unique: the readable part, and a digest where it was cut or changed."""
    plain = re.sub(r"[^A-Za-z0-9._#=-]+", "_", case_id).strip("_")
    if len(plain) <= 120:
        return plain
    return f"{plain[:100]}-{hashlib.sha256(case_id.encode()).hexdigest()[:12]}"
