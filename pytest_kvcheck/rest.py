"""A server at rest: wait for it, bounded, then read its account in full, before any flush."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.engines.base import Rules
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.oracles.base import Promises
from pytest_kvcheck.trace import Clock, GaugeSample, OpRecord, Phase


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server may take, in seconds.

    ``rest``: to come to rest after everything was closed; some gauges move every 30 s only. ``hold``: how long
    a reading that is not clean must stay the same before it is the verdict, since slow is no leak. ``answer``:
    for one small request.
    """

    rest: float = 45.0
    hold: float = 6.0
    answer: float = 60.0


PATIENT = Patience()
# For one of many quick probes: a slow server misleads one step of a search, and its end is judged patiently.
HASTY = Patience(rest=15.0, hold=1.5, answer=20.0)
DRAIN_IDS = 8_000_000

Run = Callable[[Sequence[Operation], Phase], list[OpRecord]]


@dataclass(slots=True)
class Settled:
    """The account at rest. ``reached`` False: the server did not come to rest within ``waited`` seconds."""

    account: GaugeSample
    reached: bool
    waited: float


@dataclass(slots=True)
class Bed:
    """A running server with what is measured once a launch and used by each of its cases.

    ``unfit`` says why the cell cannot be judged on it (a server that we attached to), "" where it can.
    ``scored`` and ``rounded`` are the controls of this launch as another implementation scores them;
    ``unscored`` says why it cannot.
    """

    server: Server
    clock: Clock
    cell: Cell
    vocab_size: int
    rules: Rules
    once: list[OpRecord] = field(default_factory=list)
    measured: bool = False
    drains: int = 0
    unfit: str = ""
    scored: list[OpRecord] | None = None
    rounded: list[OpRecord] = field(default_factory=list)
    unscored: str = ""

    def promises(self) -> Promises:
        """What the engine promises for this cell, in the oracles' words."""
        engine, cell = self.server.engine, self.cell
        return Promises(
            streaming_sessions=self.rules.sessions == "streaming",
            expected_cached=lambda previous, sent: engine.expected_cached(previous, sent, cell),
            lacks=self.rules.lacks,
        )

    def operation(self, **fields: object) -> Operation:
        """An operation of the harness's own, with an id that no plan has."""
        self.drains += 1
        return Operation(id=DRAIN_IDS + self.drains, **fields)  # type: ignore[arg-type]


def settle(bed: Bed, run: Run, baseline: GaugeSample | None, patience: Patience = PATIENT) -> Settled:
    """Wait, bounded, until nothing runs and the account is back at ``baseline``; then read it in full.

    ``run`` runs operations on this server. ``baseline`` None: a server on which nothing should be held.
    """
    server, engine = bed.server, bed.server.engine
    started = time.monotonic()
    line = server.log_line
    steady_since, steady, quiet = started, None, False
    while server.alive():
        sample = engine.sample(server.control, bed.clock.now())
        quiet = not sample.error and not sample.running and not sample.waiting
        reading = (quiet, _used(sample), sample.sessions)
        if reading != steady:
            steady, steady_since = reading, time.monotonic()
        now = time.monotonic()
        if quiet and home(sample, baseline):
            break
        if now - started > patience.rest or (quiet and now - steady_since > patience.hold):
            break
        time.sleep(0.1)
    return Settled(_account(bed, run, line, baseline, patience, quiet), quiet, time.monotonic() - started)


def _account(
    bed: Bed, run: Run, line: int, baseline: GaugeSample | None, patience: Patience, quiet: bool
) -> GaugeSample:
    """The account in full, read again while it may still get better: a reading may hold the request before it,
    whose answer is sent before its slots are given back. The best one has the least of our own requests in it.
    """
    server, engine = bed.server, bed.server.engine
    best, least, since = None, (True, 0, 0), time.monotonic()
    while True:
        if quiet and bed.rules.stale_when_idle:
            # Gauges move only with a batch. An engine's own check of an idle server runs behind it as well.
            nudge = bed.operation(
                kind="generate",
                input_ids=(5, 7, 11, 13),
                max_new_tokens=bed.rules.refresh_tokens,
                deadline=patience.answer,
                label="nudge",
            )
            run([nudge], "drain")
        account = engine.account(server.control, bed.clock.now(), server.log_events(line))
        busy = bool(account.running or account.waiting)
        if not quiet or account.error or not server.alive() or (home(account, baseline) and not busy):
            return account
        held = (busy, sum(used or 0 for used in _used(account)), account.sessions or 0)
        if best is None or held < least:
            best, least, since = account, held, time.monotonic()
        elif time.monotonic() - since > (patience.hold if least[0] else patience.hold / 3):
            return best
        time.sleep(patience.hold / 12)


def _used(sample: GaugeSample) -> tuple[int | None, ...]:
    return tuple(gauge.used for gauge in sample.pools)


def home(sample: GaugeSample | None, baseline: GaugeSample | None) -> bool:
    """Whether nothing is held that was not held before; on a fresh server, whether nothing is held at all."""
    if sample is None:
        return False
    before = {gauge.pool: gauge.used or 0 for gauge in baseline.pools} if baseline else {}
    sessions = (baseline.sessions or 0) if baseline else 0
    return (sample.sessions or 0) <= sessions and all(
        (gauge.used or 0) <= before.get(gauge.pool, 0) for gauge in sample.pools
    )


def clean(account: GaugeSample) -> bool:
    """Whether a server of ours may serve the next case: nothing is held, and everything could be read."""
    return not account.error and home(account, None)
