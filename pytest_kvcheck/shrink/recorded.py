"""What a trace says that was run, and what was found: enough to run it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.trace import VERDICT, Note, OpRecord, TraceHeader, read_trace
from pytest_kvcheck.workloads.plan import check_plan


@dataclass(frozen=True, slots=True)
class Recorded:
    """One trace: its head, the plan that was run, how that went, and the findings (None: it has no verdict)."""

    header: TraceHeader
    plan: Plan
    records: tuple[OpRecord, ...]
    findings: tuple[Finding, ...] | None

    def cell(self) -> Cell:
        """The cell that the trace was recorded in. Raises ``ValueError`` where it does not say."""
        try:
            return msgspec.convert(self.header.cell_spec, Cell)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"expected the cell in the trace's first line (cell_spec), found: {error}"
            ) from None


def recorded(path: Path) -> Recorded:
    """Read a trace. Raises ``OSError``, or ``ValueError`` for a file that is no whole kvcheck trace."""
    lines = list(read_trace(path))
    if not lines or not isinstance(lines[0], TraceHeader):
        raise ValueError(f"{path}: expected a kvcheck trace (its first line names engine and cell), found none")
    header = lines[0]
    every = [line for line in lines if isinstance(line, OpRecord)]
    # A server may die of the very first requests, before it sees the workload: then they are the plan.
    records = tuple(line for line in every if line.phase == "workload") or tuple(
        line for line in every if line.phase in ("probe", "control")
    )
    # Records stand in the order in which operations ended; ids grow in the order of the plan.
    operations = tuple(sorted((record.op for record in records), key=lambda op: op.id))
    try:
        check_plan(operations)
    except ValueError as error:
        raise ValueError(f"{path}: expected a whole plan, found a part of one: {error}") from None
    notes = [line for line in lines if isinstance(line, Note) and line.what == VERDICT]
    findings = None
    if notes:
        findings = tuple(msgspec.convert(notes[-1].data.get("findings", []), list[Finding]))
    plan = Plan(
        workload=header.workload,
        seed=header.seed,
        operations=operations,
        params=header.params,
        must_exercise=tuple(header.must_exercise),
    )
    return Recorded(header, plan, records, findings)
