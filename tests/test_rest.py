"""A server at rest: one reading too early is no leak, and a leak is not read away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_kvcheck.engines.base import Rules
from pytest_kvcheck.rest import Bed, Patience, settle
from pytest_kvcheck.trace import GaugeSample, OpRecord, PoolGauge

QUICK = Patience(rest=5.0, hold=0.12, answer=1.0)


def reading(used: int, running: int = 0) -> GaugeSample:
    pool = PoolGauge(pool="full", total=4096, used=used)
    return GaugeSample(t=0.0, source="test", pools=[pool], running=running, waiting=0, sessions=0)


class Engine:
    """Gives these accounts one after the other, the last one for ever."""

    def __init__(self, *accounts: GaugeSample) -> None:
        self.accounts, self.read = list(accounts), 0

    def sample(self, control: Any, t: float) -> GaugeSample:
        return reading(0)

    def account(self, control: Any, t: float, events: Any) -> GaugeSample:
        self.read += 1
        return self.accounts.pop(0) if len(self.accounts) > 1 else self.accounts[0]


def at_rest(*accounts: GaugeSample, stale: bool = True) -> tuple[int | None, int, int]:
    """What the pool is said to hold, how often that was read, and how many nudges it took."""
    engine = Engine(*accounts)
    server: Any = SimpleNamespace(
        engine=engine, control=None, log_line=0, alive=lambda: True, log_events=lambda line: []
    )
    clock: Any = SimpleNamespace(now=lambda: 0.0)
    cell: Any = None
    nudges: list[Any] = []

    def run(operations: Any, phase: Any) -> list[OpRecord]:
        nudges.extend(operations)
        return []

    bed = Bed(server, clock, cell, 512, Rules(sessions="streaming", stale_when_idle=stale))
    settled = settle(bed, run, None, QUICK)
    assert settled.reached
    return settled.account.pools[0].used, engine.read, len(nudges)


def test_a_clean_server_is_read_once() -> None:
    assert at_rest(reading(0)) == (0, 1, 1)
    assert at_rest(reading(0), stale=False) == (0, 1, 0)


@pytest.mark.parametrize("early", [reading(256, running=1), reading(256), reading(0, running=1)])
def test_a_reading_that_still_holds_the_request_before_it_is_not_the_verdict(early: GaugeSample) -> None:
    assert at_rest(early, early, reading(0)) == (0, 3, 3)


def test_what_stays_is_held() -> None:
    used, read, nudges = at_rest(reading(512, running=1), reading(256))
    assert used == 256
    assert read == nudges > 2


def test_what_each_nudge_adds_is_not_counted() -> None:
    assert at_rest(*(reading(256 + 4 * more) for more in range(400)))[0] == 256


def test_a_server_that_never_stops_running_is_not_waited_for_for_ever() -> None:
    assert at_rest(reading(256, running=1))[0] == 256
