"""A recorded plan once more: is what it found fixed, still there, or did the run go another way?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_kvcheck.cells import Case, WorkloadRef
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.shrink.minimise import NO_FAULT, same, worst
from pytest_kvcheck.shrink.recorded import Recorded
from pytest_kvcheck.trace import OpRecord

FIXED, FAILING, DIVERGED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """``status`` is the command's exit status; ``text`` starts with the word for it."""

    status: int
    text: str


def replay(was: Recorded, case: Case, bench: Bench, folder: Path, times: int) -> Verdict:
    """Run the plan up to ``times`` times; one run that fails as recorded settles it.

    Raises ``LaunchError`` where the server does not start.
    """
    faults = [finding for finding in was.findings or () if finding.status not in NO_FAULT]
    astray = ""
    for run in range(1, times + 1):
        facts, findings = bench.examine(case, was.plan, folder, last=run == times)
        hit = next((one for one in findings if any(same(one, fault) for fault in faults)), None)
        if hit is not None:
            return Verdict(FAILING, f"still failing (run {run} of {times})\n{hit.paragraph()}")
        new = worst(findings)
        if new is not None and not faults:
            return Verdict(FAILING, f"failing now, it passed when it was recorded\n{new.paragraph()}")
        astray = astray or _astray(was, new, findings, list(facts.of_phase("workload")))
        if not facts.scored and any(fault.oracle == "scorer" for fault in faults):
            astray = astray or "only another implementation shows what was found: give --scorer transformers"
    if astray:
        return Verdict(DIVERGED, f"diverged: {astray}")
    if not faults:
        return Verdict(FIXED, f"passes, as recorded ({times} runs)")
    return Verdict(FIXED, f"fixed: {faults[0].headline} did not come again in {times} runs")


def case_of(was: Recorded) -> Case:
    """The case that a trace is of. Raises ``ValueError`` where the trace does not hold its cell."""
    return Case(was.cell(), WorkloadRef(was.header.workload))


def _astray(was: Recorded, new: Finding | None, findings: Sequence[Finding], now: list[OpRecord]) -> str:
    """How the run differed so that its silence says nothing, or ""."""
    if new is not None:
        return f"another fault came instead: {new.kind} [{new.oracle}] {new.headline}"
    unsure = next((finding for finding in findings if finding.status == "inconclusive"), None)
    if unsure is not None:
        return f"the run could not be judged: {unsure.headline}"
    hits = {record.op.id: record.shown_at_action for record in now}
    late = [r for r in was.records if r.shown_at_action is not None and hits.get(r.op.id) is None]
    if late:
        op = late[0].op
        return f"{op.label or op.kind} (operation {op.id}) met a running request then, and came too late now"
    return ""
