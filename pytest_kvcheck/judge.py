"""From a case to its result: finds or starts its server, has it examined, lets the oracles judge."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pytest_kvcheck.casefiles import again, case_folder, trace_header, verdict
from pytest_kvcheck.cells import Case, Cell
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.engines.base import Engine
from pytest_kvcheck.examine import PATIENCE, Examination
from pytest_kvcheck.findings import Finding, gravest
from pytest_kvcheck.independent import Independent
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.models import vocab_size_of
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.oracles import ORACLES, judge
from pytest_kvcheck.oracles.base import CaseFacts, ServerFacts
from pytest_kvcheck.oracles.logprobs import measure
from pytest_kvcheck.report.results import CaseResult, KnownRef, write_result
from pytest_kvcheck.report.summary import named
from pytest_kvcheck.rest import Bed, clean
from pytest_kvcheck.settings import Settings
from pytest_kvcheck.trace import Clock, TraceWriter
from pytest_kvcheck.workloads import WORKLOADS, make_plan, why_not

# Seconds that one request of a plan takes, about: --kvcheck-budget turns them into rounds. A guess is enough,
# since it scales nothing but the number of rounds; and it is fixed, so that equal options give equal plans.
REQUEST_SECONDS = {"reference": 0.02, "sglang": 0.1, "vllm": 0.1}
DEFAULT_VOCABULARY = 512
# One plan is judged as a whole at its end: beyond this, --kvcheck-repeat is the better way to fuzz for longer.
GREATEST_GROWTH = 10.0


@dataclass(slots=True)
class _Failure:
    """A server that would not start: its other cases get the same words, and no second wait."""

    error: LaunchError
    reported_by: str


class Bench:
    """Runs cases one after another, with at most one server of its own at a time."""

    def __init__(self, settings: Settings, progress: Callable[[str], None] = lambda text: None) -> None:
        self.settings = settings
        self.progress = progress
        self._bed: Bed | None = None
        self._key = ""
        self._failures: dict[str, _Failure] = {}
        chosen = settings.scorer
        self._scorer = Independent(chosen, settings.python, progress) if chosen else None
        self._versions: dict[str, str] = {}

    def run(self, case: Case, case_id: str, *, last: bool, plan: Plan | None = None) -> CaseResult:
        """Run one case. Whatever goes wrong becomes its result; only ``KeyboardInterrupt`` gets out.

        ``last``: no other case needs this server, so it is stopped and its remains are part of the verdict.
        ``plan``: what to run instead of the workload's own plan.
        """
        started = time.monotonic()
        result = self._blank(case, case_id)
        folder = case_folder(self.settings, case_id)
        try:
            result = self._run(case, result, folder, last, plan)
        except LaunchError as error:
            result = replace(result, outcome="error", reason=str(error))
        except Exception as error:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "harness-error.txt").write_text(traceback.format_exc())
            result = replace(
                result,
                outcome="error",
                reason=f"kvcheck itself failed: {type(error).__name__}: {error}. The traceback is in "
                f"{folder / 'harness-error.txt'}; please report it. The other cases go on.",
            )
            self._stop()
        result = replace(result, duration_s=round(time.monotonic() - started, 3))
        if result.outcome != "skipped":
            write_result(folder, result)
        return result

    def close(self) -> None:
        """Stop what runs. Safe to call again."""
        self._stop()
        if self._scorer is not None:
            self._scorer.close()

    # --- one case --------------------------------------------------------------------------------
    def _run(self, case: Case, result: CaseResult, folder: Path, last: bool, plan: Plan | None) -> CaseResult:
        reason = self._why_not(case)
        if reason is not None:
            return replace(result, outcome="skipped", reason=reason)
        bed = self.bed_for(case.cell, result.id)
        case = dataclasses.replace(case, cell=bed.cell)
        # Only a server that we attached to can differ from what _why_not() was asked about.
        reason = bed.unfit or why_not(case.workload.name, bed.cell, case.workload.params)
        if reason:
            return replace(result, outcome="skipped", reason=reason)
        plan = plan or self._plan(case, bed, result.seed)
        argv = list(bed.server.argv)
        facts, findings = self.examine(case, plan, folder, last=last)
        if gravest(findings) == "unexercised":
            # Much of what must be seen is a race, such as an abort before the end; a starved machine may lose.
            self._stop()
            self.progress(f"{result.id}: {findings[0].headline}; once more on a new server")
            bed = self.bed_for(case.cell, result.id)
            argv = list(bed.server.argv)
            facts, findings = self.examine(case, plan, folder, last=last)
        result = replace(result, known=_known(case, facts.engine_version), notes=list(bed.server.notes))
        return self._result(result, facts, findings, folder, argv, bed.unscored)

    def examine(
        self,
        case: Case,
        plan: Plan,
        folder: Path,
        *,
        last: bool = False,
        focus: frozenset[str] | None = None,
    ) -> tuple[CaseFacts, list[Finding]]:
        """Run any plan on the server of the case's cell and judge it; its trace and gauges go to ``folder``.

        ``focus`` names the oracles that matter (None: all): what only others need is left out, and a server
        that a flush has mended is kept. Raises ``LaunchError``.
        """
        cell = case.cell
        bed = self.bed_for(cell, case.name)
        folder.mkdir(parents=True, exist_ok=True)
        gauges = folder / "gauges.jsonl"
        gauges.unlink(missing_ok=True)
        header = trace_header(bed, case, plan)
        self.progress(f"{cell.name}::{case.workload.name}: {len(plan.operations)} operations")
        with TraceWriter(folder / "trace.jsonl", header) as trace:
            facts = Examination(
                bed, case, plan, trace, plan.seed, focus, self.settings.patience or PATIENCE, self._scorer
            ).run(gauges)
            dirty = facts.idle is None or not clean(facts.idle) or not facts.server.alive
            if last and not bed.server.attached:
                facts.server = self._stop() or facts.server
            findings = judge(facts)
            if WORKLOADS[plan.workload].grows:
                pairs = "{operation_pairs} of {operation_pairs_possible}".format_map(facts.exercised)
                self.progress(f"{cell.name}::{case.workload.name}: {pairs} pairs of operations met")
            trace.write(verdict(findings, bed.clock.now()))
        outcome = gravest(findings)
        mended = focus is not None and _mended(bed, findings)
        if not mended and (outcome not in ("passed", "unexercised") or (dirty and not bed.server.attached)):
            self._stop()  # the next case must not inherit what this one left
        return facts, findings

    def _result(
        self,
        result: CaseResult,
        facts: CaseFacts,
        findings: list[Finding],
        folder: Path,
        argv: list[str],
        unscored: str,
    ) -> CaseResult:
        floor = measure(facts.records)
        lacks = dict(facts.promises.lacks)
        if facts.server.attached:
            lacks["residue"] = "the server is not ours, so it was not stopped"
        if facts.log_path is None:
            lacks["engine_log"] = "the server writes its output to no file that we can read"
        if unscored:
            lacks["scorer"] = unscored
        judged = set(ORACLES) - set(lacks) - (set() if facts.scored else {"scorer"})
        return replace(
            result,
            outcome=gravest(findings),
            reason=findings[0].headline if findings else "",
            engine_version=facts.engine_version,
            exercised=dict(facts.exercised),
            findings=findings,
            argv=list(argv),
            trace=str(folder / "trace.jsonl"),
            log=str(facts.log_path) if facts.log_path else "",
            lacks=lacks,
            judged=sorted(judged),
            noise_floor=floor.spread.greatest if floor.known else None,
        )

    def _blank(self, case: Case, case_id: str) -> CaseResult:
        cell = case.cell
        return CaseResult(
            id=case_id,
            engine=cell.engine,
            cell=cell.name,
            workload=case.workload.name,
            outcome="error",
            seed=self._seed(case),
            family=cell.family,
            device=cell.device,
            launch_key=cell.launch_key,
            known=_known(case, ""),
            command=again(self.settings, case, case_id),
        )

    def _why_not(self, case: Case) -> str | None:
        """Why the engine, its version or the cell cannot run the case, or None."""
        cell = case.cell
        engine = make_engine(cell.engine)
        version = "" if self.settings.url or cell.command else self._installed(engine)
        reason = engine.unsupported(cell, cell.device, version)
        return reason or why_not(case.workload.name, cell, case.workload.params)

    def _installed(self, engine: Engine) -> str:
        """The installed version, or "" where there is none: starting the server will say that in full."""
        if engine.name not in self._versions:
            try:
                self._versions[engine.name] = engine.installed_version(self._python())
            except LookupError:
                self._versions[engine.name] = ""
        return self._versions[engine.name]

    def _plan(self, case: Case, bed: Bed, seed: int) -> Plan:
        def made(scale: float) -> Plan:
            return make_plan(
                case.workload.name,
                case.cell,
                vocab_size=bed.vocab_size,
                seed=seed,
                params=case.workload.params,
                scale=scale,
                sessions=bed.rules.sessions,
            )

        plan = made(1.0)
        if self.settings.budget is None:
            return plan
        requests = sum(op.generates for op in plan.operations)
        estimate = requests * REQUEST_SECONDS[case.cell.engine]
        scale = self.settings.budget / estimate
        return plan if scale >= 1 and not WORKLOADS[plan.workload].grows else made(min(scale, GREATEST_GROWTH))

    def _seed(self, case: Case) -> int:
        """A seed of the case's own, equal on every machine and for any number of workers."""
        text = f"{self.settings.seed}/{case.cell.name}/{case.workload.name}/{case.repeat}"
        return zlib.crc32(text.encode())

    # --- the server ------------------------------------------------------------------------------
    def _python(self) -> str:
        return self.settings.python or sys.executable

    def bed_for(self, cell: Cell, case_id: str) -> Bed:
        """The running server of the cell's launch key, started now if need be. Raises ``LaunchError``."""
        key = cell.launch_key
        if self._bed is not None and (self._key != key or not self._bed.server.alive()):
            self._stop()
        if self._bed is None:
            failure = self._failures.get(key)
            if failure is not None:
                raise LaunchError(
                    f"its server did not start for {failure.reported_by} either, where the reason stands"
                )
            try:
                self._bed, self._key = self._start(cell), key
            except LaunchError as error:
                self._failures[key] = _Failure(error, case_id)
                raise
        return self._bed

    def _start(self, cell: Cell) -> Bed:
        engine: Engine = make_engine(cell.engine)
        clock = Clock()
        if self.settings.url is not None:
            server = Server.attach(engine, self.settings.url, cell, clock=clock.now)
        else:
            self.progress(f"starting {cell.engine} for {cell.name}")
            began = time.monotonic()
            server = Server.start(
                engine,
                cell,
                python=self._python(),
                artifacts_dir=self.settings.artifacts / "servers",
                gpus=self.settings.gpus,
                clock=clock.now,
            )
            self.progress(f"{named(cell.engine, engine.version)} ready after {time.monotonic() - began:.1f} s")
        unfit = ""
        if server.attached:
            cell = engine.adopt(cell, server.info)
            try:
                unfit = _unfit(server, cell)
            except LaunchError:
                server.stop()
                raise
        vocabulary = cell.model.vocab_size or vocab_size_of(cell.model.path) or DEFAULT_VOCABULARY
        return Bed(server, clock, cell, vocabulary, engine.rules(cell), unfit=unfit)

    def _stop(self) -> ServerFacts | None:
        bed, self._bed = self._bed, None
        return None if bed is None else bed.server.stop()


def _known(case: Case, version: str) -> list[KnownRef]:
    """The findings that are expected of this release in this case."""
    return [
        KnownRef(
            kind=known.kind, page=known.page, until=known.until, sometimes=known.sometimes, text=known.text
        )
        for known in case.known
        if known.concerns(version)
    ]


def _unfit(server: Server, cell: Cell) -> str:
    """Why the cell's name would be a lie on a server that we attached to; "" where it would not."""
    engine = server.engine
    if not server.info:
        raise LaunchError(
            f"--kvcheck-url {server.base_url}: expected a {engine.name} server, found one that does not "
            "tell its configuration. Next: give the URL of a running engine, and its kind with --kvcheck-engine"
        )
    wrong = [one for one in engine.misfits(cell, server.info) if one.partition(":")[0] not in engine.own_checks]
    return f"the server at {server.base_url} runs another configuration: {'; '.join(wrong)}" if wrong else ""


def _mended(bed: Bed, findings: list[Finding]) -> bool:
    """Whether a flush has brought everything back, on a server of ours that still runs."""
    server = bed.server
    if server.attached or not server.alive():
        return False
    # A flush gives back tokens; nothing is known to give back rows, or to free what hangs. And a server that
    # checks itself may yet end over what it has once seen missing.
    lasting = any(
        finding.oracle == "rows"
        or finding.status in ("stuck", "crash")
        or (finding.status == "leak" and bed.cell.features.strict)
        for finding in findings
    )
    if lasting:
        return False
    # Session gauges may be stale until the next batch; every session was closed before.
    sample = server.engine.sample(server.control, bed.clock.now())
    return not sample.error and bool(sample.pools) and not any(gauge.used for gauge in sample.pools)
