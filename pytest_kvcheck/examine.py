"""One case on one running server: the order in which everything is asked, and nothing else.

The order is the point. The memory verdict comes before any flush, since a flush hides leaks; the log-prob
replay comes behind it, since it needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_kvcheck.cells import Case
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines.provoke import Provoker
from pytest_kvcheck.engines.scorer import ScorerError
from pytest_kvcheck.independent import MOST_SCORED, Independent
from pytest_kvcheck.observe.blocks import StoredBlock
from pytest_kvcheck.observe.gauges import Sampler
from pytest_kvcheck.observe.logs import LogEvent, of_meaning
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.oracles import logprobs, rows
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.references import Emitted, References, emitted
from pytest_kvcheck.rest import HASTY, PATIENT, Bed, home, settle
from pytest_kvcheck.trace import FINISHED, GaugeSample, Note, OpRecord, Phase, PoolGauge, TraceWriter
from pytest_kvcheck.workloads import replay
from pytest_kvcheck.workloads.plan import open_sessions
from pytest_kvcheck.workloads.runner import Runner

# How long one request may take, in seconds; a plan stops when none showed a token for that long.
PATIENCE = 120.0
# No plan may run longer than this, however long its single operations are allowed to take.
PLAN_BOUND = 1800.0


# The oracles that the probes behind the verdict, and the replay, are for.
PROBED = frozenset({"rows", "liveness"})
REPLAYED = frozenset({"logprobs", "self_test", "scorer"})


class Examination:
    """The examination of one case; :meth:`run` returns all that was seen of it, for the oracles.

    ``focus`` names the oracles that matter (None: all of them): phases that only others need are left out.
    """

    def __init__(
        self,
        bed: Bed,
        case: Case,
        plan: Plan,
        trace: TraceWriter,
        seed: int,
        focus: frozenset[str] | None = None,
        patience: float = PATIENCE,
        scorer: Independent | None = None,
    ) -> None:
        self.bed, self.case, self.plan, self.trace, self.seed = bed, case, plan, trace, seed
        self.focus, self.patience = focus, PATIENT if focus is None else HASTY
        self.scorer = scorer
        self.server, self.engine, self.control = bed.server, bed.server.engine, bed.server.control
        self.runner = Runner(
            self.engine,
            self.server.base_url,
            clock=bed.clock,
            trace=trace,
            alive=self.server.alive,
            patience=patience,
        )
        self.records: list[OpRecord] = list(bed.once)
        for record in bed.once:
            trace.write(record)

    def run(self, gauges: Path) -> CaseFacts:
        """All phases in order. A dead server is asked nothing more; what was seen until then is judged."""
        line = self.server.log_line
        self.server.mark()
        baseline = settle(self.bed, self._run, None, self.patience)
        facts = self._facts(baseline.account)
        if not self.bed.measured and self._matters(PROBED | REPLAYED):
            self._measure_launch()
        # A client of its own: requests sessions are not shared between threads.
        watch = Control(self.server.base_url, timeout=10.0)
        with Sampler(lambda t: self.engine.sample(watch, t), self.bed.clock.now, gauges) as sampler:
            with Provoker(self.server.base_url, self.engine.provoke_call(self.case.cell)):
                self._run(self.plan.operations, "workload")
            self._close_sessions()
            settled = settle(self.bed, self._run, baseline.account, self.patience)
            facts.samples = sampler.stop()
        watch.close()
        facts.idle, facts.idle_reached, facts.idle_wait = settled.account, settled.reached, settled.waited
        self.trace.write(settled.account)
        # A server that serves nothing is asked nothing more: every further question would wait its whole time.
        if self.server.alive() and (not self._matters(PROBED) or self._probe(facts)):
            if self._matters(REPLAYED):
                self._replay(facts)
            else:
                self._flush()
        facts.records, facts.client_lag = self.records, self.runner.client_lag
        facts.log = self.server.log_events(line)
        _append_accounts(gauges, facts.log)
        facts.log_tail, facts.log_path = self.server.log_tail(), self.server.log_path
        facts.server = self.server.facts()
        return facts

    def _matters(self, oracles: frozenset[str]) -> bool:
        return self.focus is None or bool(self.focus & oracles)

    # --- phases ----------------------------------------------------------------------------------
    def _facts(self, baseline: GaugeSample) -> CaseFacts:
        return CaseFacts(
            cell=self.case.cell,
            plan=self.plan,
            promises=self.bed.promises(),
            records=self.records,
            baseline=baseline,
            engine=self.engine.name,
            engine_version=self.engine.version,
        )

    def _run(self, operations: Sequence[Operation], phase: Phase) -> list[OpRecord]:
        if not operations or not self.server.alive():
            return []
        records = self.runner.run(operations, phase=phase, budget=PLAN_BOUND)
        self.records += records
        return records

    def _measure_launch(self) -> None:
        """Once a launch, on a server at rest: the healthy canary, and the controls for the noise floor."""
        cell, vocab = self.case.cell, self.bed.vocab_size
        once = self._run(replay.canary_plan(cell, vocab, self.seed, when="before").operations, "probe")
        for attempt in (1, 2):
            if self._row_probe(attempt, "before"):
                break
        if self._matters(REPLAYED):
            once += self._run(replay.control_plan(cell, vocab, self.seed).operations, "control")
            once += self._run(replay.replay_plan(once, start_id=replay.REPLAY + 500_000).operations, "replay")
            once += self._run(replay.self_test_plan(once, vocab).operations, "replay")
        self.bed.once, self.bed.measured = list(self.records), True
        self._flush()

    def _close_sessions(self) -> None:
        """Close what the plan left open, so that nothing but a leak can hold memory.

        Not what was opened with a timeout: closing it would hide that the server forgets to.
        """
        names = open_sessions(self.records)
        self._run(
            [
                self.bed.operation(kind="close", session=name, label=f"close {name} at the end")
                for name in names
            ],
            "drain",
        )

    def _probe(self, facts: CaseFacts) -> bool:
        """A real request, then as many at once as there are request rows; each again if that was not enough.
        In between, where memory is missing, what of it is still in the prefix cache.

        Returns whether the server serves a request at all.
        """
        cell, vocab = self.case.cell, self.bed.vocab_size
        served = False
        # The nudge was a request too: where that got no reply, one more is enough.
        nudged = [record.reply.finish for record in self.records if record.op.label == "nudge"]
        for attempt in (1, 2) if nudged[-1:] != ["timeout"] else (2,):
            canary = replay.canary_plan(cell, vocab, self.seed, attempt, deadline=self.patience.answer)
            done = self._run(canary.operations, "probe")
            served = all(record.reply.finish in FINISHED for record in done)
            if served:
                break
        if served and not home(facts.idle, facts.baseline):
            self._run(replay.pins_plan(self.records).operations, "probe")
        for attempt in (1, 2, 3):
            if not served or self._row_probe(attempt, "after"):
                break
        if served and not home(facts.idle, facts.baseline):
            facts.kept = self._overwrite(facts)
        return served

    def _overwrite(self, facts: CaseFacts) -> list[StoredBlock] | None:
        """Which blocks outlive a pool full of fresh tokens, by the engine's own events; None: not told."""
        before = self.engine.stored_blocks()
        pool = facts.idle.pool("full") if facts.idle is not None else None
        if before is None or pool is None or pool.total is None or pool.used is None:
            return None
        room, deadline = pool.total - pool.used, self.patience.answer
        plan = replay.overwrite_plan(self.case.cell, self.bed.vocab_size, self.seed, room, deadline)
        if not plan.operations:
            return None
        for op in plan.operations:
            if any(record.reply.finish != "length" for record in self._run([op], "probe")):
                return None
        after = self.engine.stored_blocks()
        if after is None or not self.server.alive():
            return None
        kept = [block for key, block in after.items() if before.get(key) is block]
        told = [{"tokens": len(block.prefix()), "users": block.users} for block in kept]
        self.trace.write(Note(t=self.bed.clock.now(), what="kept blocks", data={"blocks": told}))
        return kept

    def _row_probe(self, attempt: int, when: str) -> bool:
        """Whether as many requests as there are rows ran side by side (or could not be asked to)."""
        plan = replay.row_probe_plan(self.case.cell, self.bed.vocab_size, self.seed, attempt, when)
        done = [record for record in self._run(plan.operations, "probe") if record.op.generates]
        probe = rows.read_probe(done)
        return not done or (probe is not None and probe.peak >= self.case.cell.features.max_running)

    def _replay(self, facts: CaseFacts) -> None:
        """Score the visible histories from scratch; what looks wrong is run again with controls of its own."""
        self._flush()
        context = self.case.cell.features.context_length
        self._run(replay.replay_plan(self.records, None, context).operations, "replay")
        facts.records = self.records
        found = logprobs.suspects(facts)
        if found:
            self._run(replay.confirm_plan(found).operations, "control")
            again = replay.replay_plan(self.records, None, context, start_id=replay.REPLAY + 700_000)
            self._run(again.operations, "replay")
        if self.scorer is not None and not self.bed.unscored and self._matters(frozenset({"scorer"})):
            self._score(facts, self.scorer, [suspect.emitted for suspect in found[:MOST_SCORED]])

    def _score(self, facts: CaseFacts, scorer: Independent, doubted: Sequence[Emitted]) -> None:
        """Score by another implementation: the controls once a launch, then what the workload showed."""
        context, bed = self.case.cell.features.context_length, self.bed
        try:
            if bed.scored is None:
                controls = [one for one in emitted(bed.once) if one.record.phase == "control"]
                bed.scored = scorer.score(self.server, controls)
                bed.rounded = scorer.score(self.server, controls, rounded=True)
            first = [one for one in doubted if one.record.phase == "workload"]
            asked = [record for record in self.records if record.phase == "workload"]
            chosen = replay.histories(asked, References(bed.scored), MOST_SCORED, context)
            known = {one.ids for one in chosen}
            chosen += [one for one in first if one.ids not in known]
            facts.scored = [*bed.scored, *scorer.score(self.server, chosen)]
            facts.rounded = bed.rounded
        except ScorerError as error:
            bed.unscored = str(error)
        for record in (*facts.scored, *facts.rounded):
            self.trace.write(record)

    def _flush(self) -> None:
        # A flush clears other people's sessions too: on a server that is not ours, only where there are none.
        if self.server.attached:
            sample = self.engine.account(self.control, self.bed.clock.now(), [])
            if sample.sessions or sample.running:
                self.trace.write(Note(t=self.bed.clock.now(), what="not flushed: others use this server"))
                return
        self._run([self.bed.operation(kind="flush", label="flush")], "drain")


def _append_accounts(path: Path, events: Sequence[LogEvent]) -> None:
    """Add the engine's own per-iteration sums, which no endpoint gives, to the gauges of the case."""
    with path.open("ab") as file:
        for event in of_meaning(events, "account"):
            sample = GaugeSample(t=event.t, source="log", pools=[msgspec.convert(event.fields, PoolGauge)])
            file.write(msgspec.json.encode(sample) + b"\n")
