"""Random traffic with the strict check on: no violation, and every log-prob as a plain forward gives it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from reference_helpers import (
    Client,
    tokens,
    worst_difference,
    write_draft,
    write_model,
    write_swa_model,
)

from pytest_kvcheck.reference.batch import Request
from pytest_kvcheck.reference.engine import Options, Speculation
from pytest_kvcheck.reference.scheduler import Rejected

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "page-1": {},
    "page-1-serial": {"overlap": False},
    "page-16": {"page_size": 16, "chunk": 64},
    "page-256": {"page_size": 256, "chunk": 512, "pool": 256 * 40},
    "retract": {"retract_interval": 3},
    "retract-serial": {"retract_interval": 2, "overlap": False, "page_size": 4},
    "mixed-retract": {"mixed_chunk": True, "retract_interval": 3, "chunk": 32},
    "mixed-page-16": {"mixed_chunk": True, "page_size": 16, "chunk": 32},
    "tiny-pool": {"pool": 420, "chunk": 32, "context": 256},
    "tiny-pool-page-16": {"pool": 640, "chunk": 32, "page_size": 16, "context": 256},
    "tiny-pool-mixed": {"pool": 480, "chunk": 32, "mixed_chunk": True, "context": 256, "overlap": False},
    "no-prefix-cache": {"prefix_cache": False, "page_size": 4, "retract_interval": 4},
}
SPECULATION: dict[str, dict[str, Any]] = {
    "v1": {"v2": False},
    "v1-page-16-retract": {"v2": False, "page_size": 16, "retract_interval": 3},
    "v1-tiny-pool": {"v2": False, "pool": 420, "chunk": 32, "context": 256},
    "v2": {},
    "v2-page-16-retract": {"page_size": 16, "retract_interval": 3},
    "v2-page-256": {"page_size": 256, "chunk": 512, "pool": 256 * 40},
    "v2-no-overlap-retract": {"overlap": False, "retract_interval": 3},
    "v2-mixed": {"mixed_chunk": True, "chunk": 32, "retract_interval": 4},
    "v1-topk-2": {"v2": False, "topk": 2, "draft_tokens": 6},
    "v2-topk-3-page-16-retract": {"topk": 3, "page_size": 16, "retract_interval": 3},
    "v2-tiny-pool": {"pool": 460, "chunk": 32, "context": 256},
}
SLIDING: dict[str, dict[str, Any]] = {
    "swa": {},
    "swa-page-16": {"page_size": 16},
    "swa-page-32": {"page_size": 32, "retract_interval": 3},
    "swa-page-256": {"page_size": 256, "chunk": 512, "pool": 256 * 50},
    "swa-retract": {"retract_interval": 3},
    "swa-mixed-retract": {"mixed_chunk": True, "retract_interval": 3, "chunk": 32},
    "swa-tiny-pool": {"pool": 420, "chunk": 32, "context": 256},
    "swa-small-window-pool": {"pool": 2000, "swa_ratio": 0.25, "chunk": 32, "page_size": 4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_draft(folder / "draft", write_model(folder / "full"))
    write_draft(folder / "swa-draft", write_swa_model(folder / "swa"))
    return folder


class Traffic:
    """Sessions and plain requests at random; aborts, closes and time-outs whenever they come."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.shared = tokens(self.rng, 40)
        self.sessions: dict[str, list[int]] = {}
        self.turns: dict[Request, tuple[str, list[int]]] = {}
        self.plain: list[Request] = []
        self.compared = 0
        self.refused: list[str] = []

    def act(self) -> None:
        """One random action and a few iterations."""
        rng, scheduler = self.rng, self.client.scheduler
        choice = rng.random()
        if choice < 0.15 and len(self.sessions) < 4:
            self.sessions[self.client.open()] = []
        elif choice < 0.45 and self.sessions:
            self.turn(rng.choice(list(self.sessions)))
        elif choice < 0.7 and len(self.plain) < 5:
            shared = self.shared[: rng.choice([0, 0, 16, 40])]
            start = rng.choice([-1, -1, 0, len(shared)])
            prompt = shared + tokens(rng, rng.randint(1, 60))
            self.plain.append(self.client.send(prompt, rng.randint(0, 20), input_start=start))
        elif choice < 0.82:
            scheduler.abort(f"r{rng.randint(max(1, self.client.number - 6), self.client.number + 1):06d}")
        elif choice < 0.88 and self.sessions:
            closed = rng.choice(list(self.sessions))
            scheduler.close_session(closed)
            del self.sessions[closed]
        self.client.steps(rng.choice([0, 1, 1, 2, 5]))
        self.settle()

    def turn(self, session: str) -> None:
        new = tokens(self.rng, self.rng.randint(1, 50))
        try:
            request = self.client.send(new, self.rng.randint(1, 20), session)
        except Rejected as error:
            self.refused.append(str(error))
            return
        assert request.prompt == self.sessions[session] + new
        self.turns[request] = (session, request.prompt)

    def settle(self) -> None:
        """Compare what has ended with the plain forward and with the client's own ledger."""
        model = self.client.scheduler.executor.model
        for request in [r for r in self.turns if r.finish is not None]:
            session, prompt = self.turns.pop(request)
            self.compared += 1
            assert worst_difference(model, prompt, request) < 1e-4
            if request.finish is not None and request.finish["type"] != "abort" and session in self.sessions:
                self.sessions[session] = prompt + request.output
        for request in [r for r in self.plain if r.finish is not None]:
            self.plain.remove(request)
            self.compared += 1
            assert worst_difference(model, request.prompt, request) < 1e-4


def run(options: Options, seed: int) -> Client:
    """Random traffic to its end; everything must come back."""
    client = Client(options)
    traffic = Traffic(client, seed)
    for _ in range(100):
        traffic.act()
    client.drain()
    traffic.settle()
    for session in traffic.sessions:
        client.scheduler.close_session(session)
    client.drain()
    assert client.used == 0
    assert len(client.scheduler.cache.memory.rows.free) == 8
    assert traffic.compared > 25
    assert not client.scheduler.sessions.by_id
    expected = ("already has an active", "exceeds the maximum")
    assert all(any(text in message for text in expected) for message in traffic.refused)
    return client


def options_for(folder: Path, changes: dict[str, Any]) -> Options:
    settings = {"chunk": 64, "context": 512, "pool": 4096, "max_running": 8, **changes}
    return Options(folder, streaming_sessions=True, **settings)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_leaks_and_logprobs_hold(name: str, models: Path) -> None:
    run(options_for(models / "full", CONFIGURATIONS[name]), 1)


@pytest.mark.parametrize("name", SPECULATION)
def test_speculation_leaks_nothing_and_logprobs_hold(name: str, models: Path) -> None:
    changes = dict(SPECULATION[name])
    given = {name: changes.pop(name) for name in ("v2", "topk", "draft_tokens") if name in changes}
    speculation = Speculation(models / "draft", 3, **given)
    run(options_for(models / "full", {**changes, "speculation": speculation}), 2)


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_window_leaks_nothing_and_logprobs_hold(name: str, models: Path) -> None:
    run(options_for(models / "swa", SLIDING[name]), 3)


def test_speculation_over_a_sliding_window(models: Path) -> None:
    speculation = Speculation(models / "swa-draft", 3, topk=2, draft_tokens=5)
    run(options_for(models / "swa", {"speculation": speculation, "retract_interval": 3, "page_size": 4}), 1)
