"""Every workload, run against a fake server: whether what it expects is what a right server does."""

from __future__ import annotations

import time

import pytest
from client_helpers import FakeEngine, cell, drain
from fake_server import FakeServer, Json

from pytest_kvcheck.trace import OpRecord
from pytest_kvcheck.workloads import WORKLOADS, make_plan, why_not
from pytest_kvcheck.workloads.base import Param
from pytest_kvcheck.workloads.runner import Runner

SMALL = {"context_length": 1024, "pool_tokens": 3072, "chunked_prefill": 128, "max_running": 12}
SHORT: dict[str, dict[str, Param]] = {
    "disconnect-mid-turn": {"settle_seconds": 1.0},
    "session-timeout": {"max_new_tokens": 32},
}


def only_long_ones_are_slow(body: Json) -> str:
    return "slow" if body["sampling_params"]["max_new_tokens"] >= 32 else "ok"


def as_expected(record: OpRecord, left: set[int | None]) -> bool:
    finish = record.reply.finish
    if record.op.id in left:
        return finish in ("disconnected", "length")
    return finish in {
        "finish": ("length",),
        "reject": ("rejected",),
        "abort": ("abort",),
        "either": ("length", "abort"),
    }.get(record.op.expect, ())


def quiet(server: FakeServer) -> bool:
    """Whether nothing runs any more; a socket that was closed last is noticed a moment later."""
    until = time.monotonic() + 60
    while server.in_flight and time.monotonic() < until:
        time.sleep(0.05)
    return not server.in_flight


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_right_server_gives_what_the_workload_expects(name: str) -> None:
    here = cell(**SMALL)
    assert why_not(name, here) is None
    plan = make_plan(name, here, vocab_size=512, seed=5, scale=0.001, params=SHORT.get(name))
    with FakeServer(only_long_ones_are_slow) as server:
        server.context = here.features.context_length
        runner = Runner(FakeEngine(), server.url)
        records = runner.run(plan.operations)
        records += runner.run(drain(records), phase="drain")
        assert quiet(server)
        # The fake server reaps nothing, and what has a timeout is left to the server.
        timed = sum(op.kind == "open" and op.timeout is not None for op in plan.operations)
        assert len(server.sessions) <= timed
    assert len({record.op.id for record in records}) == len(records) >= len(plan.operations)
    left = {record.op.target for record in records if record.op.kind == "disconnect"}
    for record in records:
        where = f"{record.op.label}: {record.reply.finish} {record.reply.message}"
        assert as_expected(record, left) if record.op.generates else record.reply.finish == "stop", where
        assert record.reply.faults == [], where
        if record.op.kind == "turn" and record.reply.finish == "length":
            assert record.reply.prompt_tokens == record.history + len(record.op.input_ids), where
    # Whatever is to be stopped while it decodes is long enough for that: most are caught, however slow this
    # machine is. (The fake server has no queue in which a request could be caught before.)
    actions = [
        record for record in records if record.op.kind in ("abort", "disconnect") and record.op.when_tokens
    ]
    caught = sum(record.shown_at_action is not None for record in actions)
    assert caught * 2 >= len(actions) or name == "fuzz"  # which aborts within two tokens of the end, on purpose
