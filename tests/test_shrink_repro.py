"""The emitted programs against a real server: 1 while the fault is there, 0 without it, 2 without a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_shrink_emit import FINDINGS

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.reach import cell_of
from pytest_kvcheck.shrink import passes
from pytest_kvcheck.shrink.emit import ROUNDS, Launch, emit
from pytest_kvcheck.shrink.minimise import Minimised, Rate
from pytest_kvcheck.workloads.plan import PlanBuilder

# Faults that leave each other alone, so that one server shows them all.
PLANTED = ("close-in-flight-leak", "abort-queued-row", "cached-tokens-off-by-one", "stale-kv-slot")


def closed_in_flight(plan: PlanBuilder) -> None:
    plan.open("s0")
    plan.close("s0", target=plan.turn("s0", 20, 60, expect="either"), when_tokens=2)


def aborted_in_queue(plan: PlanBuilder) -> None:
    long = plan.generate(900, 2)
    queued = plan.generate(20, 8, expect="either", target=long)
    plan.abort(queued, when_tokens=0)


def two_turns(plan: PlanBuilder) -> None:
    plan.open("s0")
    plan.turn("s0", 20, 8, logprobs="output")
    plan.turn("s0", 20, 8, logprobs="output")


PLANS = {"used": closed_in_flight, "rows": aborted_in_queue, "counts": two_turns, "logprobs": two_turns}


def program(check: str, folder: Path, cell: Cell) -> Path:
    builder = PlanBuilder("test", 1, 512)
    PLANS[check](builder)
    plan = Plan(workload="test", seed=1, operations=tuple(builder.operations))
    rate = Rate(3, 3)
    plan = passes.with_seeded_prompts(passes.renumbered(passes.direct(plan)))
    made = Minimised(plan, cell, FINDINGS[check], rate, rate, 9, 9, 9.0, False, [])
    return emit(
        folder,
        made,
        Launch((), {}, "reference", "1"),
        tolerance=0.1,
        cached=lambda history, sent: (history - 1, history),
    )


@pytest.fixture(scope="module", params=[PLANTED, ()], ids=["planted", "clean"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cell = cell_of("plain", plant=request.param, silent=True)
    folder = tmp_path_factory.mktemp("server")
    with Server.start(make_engine("reference"), cell, python=sys.executable, artifacts_dir=folder) as started:
        yield started


def run(path: Path, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), url], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("check", PLANS)
def test_the_program_tells_a_faulty_server_from_a_clean_one(check: str, server: Server, tmp_path: Path) -> None:
    path = program(check, tmp_path, replace(server.cell, plant=()))
    done = run(path, server.base_url)
    planted = bool(server.cell.plant)
    assert done.returncode == planted, done.stdout + done.stderr
    assert done.stdout == f"as expected in {ROUNDS} rounds\n" or planted
    assert not done.stderr


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    done = run(program("used", tmp_path, cell_of("plain")), "http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stdout.startswith("no server at http://127.0.0.1:9: ")
