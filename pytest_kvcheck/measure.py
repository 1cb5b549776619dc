"""How good is the detector? Every planted fault is looked for, beside a clean twin that must stay silent."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_kvcheck.cells import Case, Cell, WorkloadRef
from pytest_kvcheck.findings import Finding, some
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.reach import REACH, cell_of
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.shrink.minimise import NO_FAULT
from pytest_kvcheck.trace import OpRecord, read_trace

Size = Callable[[Case, CaseResult], int | None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A fault planted in ``cell``, and its ``twin``, equal but for the fault. ``kinds`` are right for it."""

    name: str
    kinds: frozenset[str]
    check: str
    cell: Cell
    twin: Cell
    workload: WorkloadRef


@dataclass(slots=True)
class Row:
    """What became of one subject. ``seconds`` and ``requests`` are those of the load until the verdict, over
    all ``plans`` that it took.
    """

    subject: Subject
    outcome: str
    reason: str
    defects: list[Finding]
    requests: int = 0
    seconds: float = 0.0
    operations: int | None = None
    plans: int = 1

    @property
    def found(self) -> bool:
        return bool(self.defects)

    @property
    def named(self) -> str:
        """How well the gravest finding names the kind: ``right``, ``also`` (among those that fit) or ``no``."""
        if not self.defects:
            return "no"
        if self.defects[0].kind in self.subject.kinds:
            return "right"
        every = {kind for finding in self.defects for kind in (finding.kind, *finding.also)}
        return "also" if every & self.subject.kinds else "no"


@dataclass(slots=True)
class Measurement:
    """All rows, and each clean twin that was not silent with what it said."""

    rows: list[Row] = field(default_factory=list)
    twins: int = 0
    alarms: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    cut: bool = False  # interrupted: the rows are those of before

    @property
    def good(self) -> bool:
        return not self.cut and bool(self.rows) and all(row.found for row in self.rows) and not self.alarms

    @property
    def summary(self) -> str:
        """The one line that says it all."""
        found = [row for row in self.rows if row.found]
        right = sum(row.named == "right" for row in found)
        named = sum(row.named == "also" for row in found)
        return (
            f"{len(found)} of {len(self.rows)} found; kind right in {right}, among those named in {named}, "
            f"wrong in {len(found) - right - named}; {len(self.alarms)} alarms from {self.twins} clean twins; "
            f"{self.seconds:.0f} s" + (", then interrupted" if self.cut else "")
        )


def reference_subjects(
    kinds: dict[str, str], checks: Iterable[str], workload: str | None = None
) -> list[Subject]:
    """The faults of the reference engine (name -> kind), with its strict check ``on`` and ``off``; each before
    the workload of its row, or all of them before this one.

    Raises ``LookupError`` for a fault that :data:`~pytest_kvcheck.reach.REACH` does not know.
    """
    lost = sorted(set(kinds) - set(REACH))
    if lost:
        raise LookupError(f"expected a row for every fault in pytest_kvcheck/reach.py, found none for {lost}")
    found = []
    for check in checks:
        silent = check == "off"
        for name, kind in kinds.items():
            reach = REACH[name]
            if check not in reach.checks:
                continue
            cell = cell_of(reach.cell, plant=(name,), silent=silent)
            twin = cell_of(reach.cell, silent=silent)
            chosen = WorkloadRef(workload) if workload else reach.workload
            found.append(Subject(name, frozenset({kind}), check, cell, twin, chosen))
    return found


def measure(
    subjects: Sequence[Subject],
    bench: Bench,
    *,
    plans: int = 1,
    size: Size | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Run every distinct twin with ``plans`` plans of its workload, and every subject with as many or until it
    is found. ``size`` minimises a found case and says how far. An interrupt ends it with what there is by then.
    """
    found = Measurement()
    began = time.monotonic()
    try:
        _clean(found, subjects, bench, plans, progress)
        _planted(found, subjects, bench, plans, size, progress)
    except KeyboardInterrupt:
        found.cut = True
    found.seconds = time.monotonic() - began
    return found


def _clean(
    found: Measurement, subjects: Sequence[Subject], bench: Bench, plans: int, progress: Callable[[str], None]
) -> None:
    twins = {(s.twin.launch_key, s.workload.name): s for s in subjects}
    # Those of one launch key stand together and share a server.
    ordered = [twins[key] for key in sorted(twins)]
    for subject, following in itertools.zip_longest(ordered, ordered[1:]):
        last = following is None or following.twin.launch_key != subject.twin.launch_key
        case_id = f"clean-{subject.check}::{subject.twin.name}::{subject.workload.name}"
        for number in range(plans):
            case = Case(subject.twin, subject.workload, number)
            result = bench.run(case, case_id, last=last and number == plans - 1)
            if result.outcome != "passed":
                found.alarms[case_id] = f"{result.outcome}: {result.reason}"
        found.twins += 1
        progress(f"clean twin {case_id}: {found.alarms.get(case_id, 'silent')}")


def _planted(
    found: Measurement,
    subjects: Sequence[Subject],
    bench: Bench,
    plans: int,
    size: Size | None,
    progress: Callable[[str], None],
) -> None:
    silent = {subject.name for subject in subjects if subject.check == "off"}
    for subject in subjects:
        case_id = f"{subject.name}-{subject.check}::{subject.cell.name}::{subject.workload.name}"
        requests, seconds = 0, 0.0
        for number in range(plans):
            case = Case(subject.cell, subject.workload, number)
            result = bench.run(case, case_id, last=True)
            defects = [finding for finding in result.findings if finding.status not in NO_FAULT]
            asked, took = _effort(result)
            requests, seconds = requests + asked, seconds + took
            if defects:
                break
        row = Row(subject, result.outcome, result.reason, defects, requests, seconds, plans=number + 1)
        # A search turns the engine's check off where it can: once for each fault is enough.
        if size is not None and row.found and (subject.check == "off" or subject.name not in silent):
            row.operations = size(case, result)
        found.rows.append(row)
        progress(f"{subject.name}, check {subject.check}: {row.outcome} {_kinds(row)}")


def _effort(result: CaseResult) -> tuple[int, float]:
    """Requests of the workload, and seconds from the first of them to the last operation of the case."""
    if not result.trace or not Path(result.trace).exists():
        return 0, 0.0
    records = [line for line in read_trace(Path(result.trace)) if isinstance(line, OpRecord)]
    asked = [record for record in records if record.op.generates and record.rid is not None]
    # A server may not live to see the workload.
    load = [record for record in asked if record.phase == "workload"] or asked
    if not load:
        return 0, 0.0
    return len(load), max(r.ended for r in records) - min(r.started for r in load)


def _kinds(row: Row) -> str:
    if not row.defects:
        return row.reason
    also = row.defects[0].also
    return row.defects[0].kind + (f" (also {', '.join(also)})" if also else "")


def table(measured: Measurement) -> str:
    """The measurement as Markdown."""
    head = (
        "| fault | kind | check | cell :: workload | found | named | by | plans | requests | seconds | repro |"
    )
    lines = [head, "|---" * 11 + "|"]
    for row in measured.rows:
        subject = row.subject
        cells = [
            f"`{subject.name}`",
            "/".join(sorted(subject.kinds)),
            subject.check,
            f"{subject.cell.name} :: {subject.workload.name}",
            row.outcome if row.found else f"**missed** ({row.outcome})",
            f"{row.named}: {_kinds(row)}" if row.found else "",
            ", ".join(dict.fromkeys(finding.oracle for finding in row.defects)),
            str(row.plans),
            str(row.requests),
            f"{row.seconds:.1f}",
            "" if row.operations is None else some(row.operations, "operation"),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", *(f"- **false alarm** {name}: {why}" for name, why in measured.alarms.items())]
    return "\n".join(lines).rstrip() + "\n"
