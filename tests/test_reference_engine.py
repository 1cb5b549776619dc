"""What the reference engine promises, one behaviour at a time, without HTTP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_helpers import (
    Client,
    plain_logprobs,
    tokens,
    worst_difference,
    write_draft,
    write_model,
    write_swa_model,
)

from pytest_kvcheck.reference.batch import Request, Sampling
from pytest_kvcheck.reference.engine import OptionError, Options, Speculation
from pytest_kvcheck.reference.scheduler import Rejected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_draft(folder / "draft", write_model(folder / "full"))
    write_swa_model(folder / "swa")
    return folder


@pytest.fixture
def rng() -> random.Random:
    return random.Random(5)


def start(folder: Path, **changes: Any) -> Client:
    settings = {"chunk": 64, "context": 512, "pool": 4096, "max_running": 8, **changes}
    return Client(Options(folder, streaming_sessions=True, **settings))


def test_prefix_is_found_in_whole_pages(models: Path, rng: random.Random) -> None:
    client = start(models / "full", page_size=16)
    shared = tokens(rng, 40)
    first = client.send(shared + tokens(rng, 10), 4)
    client.drain()
    second = client.send(shared + tokens(rng, 10), 4)
    client.drain()
    assert (first.cached, second.cached) == (0, 32)


@pytest.mark.parametrize("changes", [{}, {"retract_interval": 2}, {"overlap": False, "page_size": 16}])
def test_input_logprobs_are_those_of_a_plain_forward(
    changes: dict[str, Any], models: Path, rng: random.Random
) -> None:
    client = start(models / "full", **changes)
    prompts = [tokens(rng, 150), tokens(rng, 90)]
    requests = [
        client.send(prompt, 6, input_start=start, tops=2)
        for prompt, start in zip(prompts, (0, 30), strict=True)
    ]
    client.drain()
    for prompt, begin, request in zip(prompts, (0, 30), requests, strict=True):
        with torch.inference_mode():
            table = plain_logprobs(client.scheduler.executor.model, prompt)
        expected = [float(table[i - 1, prompt[i]]) for i in range(begin + 1, len(prompt))]
        assert request.input_logprobs == pytest.approx(expected, abs=1e-4)
        best = [float(table[i - 1].max()) for i in range(begin + 1, len(prompt))]
        assert [tops[0][0] for tops in request.input_tops] == pytest.approx(best, abs=1e-4)
        assert [tops[0][0] for tops in request.output_tops] == pytest.approx(request.output_logprobs, abs=1e-4)


def test_abort_rolls_back_to_the_last_finished_turn(models: Path, rng: random.Random) -> None:
    client = start(models / "full")
    session = client.open()
    first = client.send(tokens(rng, 20), 8, session)
    client.drain()
    aborted = client.send(tokens(rng, 30), 50, session)
    client.steps(6)
    assert client.scheduler.abort(aborted.rid) == 1
    last = client.send(tokens(rng, 5), 8, session)
    client.drain()
    assert aborted.finish is not None
    assert aborted.finish["type"] == "abort"
    assert last.prompt[:-5] == first.prompt + first.output
    assert last.cached in (27, 28)
    assert worst_difference(client.scheduler.executor.model, last.prompt, last) < 1e-4


def test_close_during_a_turn_waits_for_its_end(models: Path, rng: random.Random) -> None:
    client = start(models / "full")
    session = client.open()
    turn = client.send(tokens(rng, 20), 12, session)
    client.steps(3)
    client.scheduler.close_session(session)
    with pytest.raises(Rejected, match="does not exist"):
        client.send([5], 1, session)
    client.drain()
    assert len(turn.output) == 12
    assert client.used == 0
    assert not client.scheduler.sessions.by_id


def test_idle_sessions_make_room_for_a_request_that_nothing_else_could(
    models: Path, rng: random.Random
) -> None:
    client = start(models / "full", pool=300, context=256)
    sessions = [client.open() for _ in range(4)]
    histories = []
    for session in sessions:
        turn = client.send(tokens(rng, 60), 8, session)
        client.drain()
        histories.append(turn.prompt + turn.output)
    plain = client.send(tokens(rng, 200), 4)
    client.drain()
    assert len(plain.output) == 4
    # The session that gave its KV up goes on with its whole history.
    turn = client.send(tokens(rng, 5), 4, sessions[0])
    client.drain()
    assert turn.prompt[:-5] == histories[0]
    assert worst_difference(client.scheduler.executor.model, turn.prompt, turn) < 1e-4


def test_forced_retraction_is_counted_and_changes_nothing(models: Path) -> None:
    def outputs(**changes: Any) -> list[Request]:
        client, rng = start(models / "full", **changes), random.Random(1)
        requests = [client.send(tokens(rng, 30), 20) for _ in range(3)]
        client.drain()
        return requests

    calm, retracted = outputs(), outputs(retract_interval=3)
    assert sum(r.retractions for r in calm) == 0
    assert sum(r.retractions for r in retracted) > 3
    assert [r.output for r in calm] == [r.output for r in retracted]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("v2", "overlap", "topk"), [(False, False, 1), (True, True, 1), (True, False, 2), (True, True, 2)]
)
def test_speculation_gives_the_same_tokens_in_fewer_rounds(
    v2: bool, overlap: bool, topk: int, temperature: float, models: Path
) -> None:
    def outputs(speculation: Speculation | None) -> list[Request]:
        client, rng = start(models / "full", speculation=speculation, overlap=overlap), random.Random(2)
        sampling = Sampling(40, temperature, seed=3)
        requests = [Request(f"r{i}", tokens(rng, 25), sampling, logprobs=True) for i in range(3)]
        for request in requests:
            client.scheduler.submit(request)
        client.drain()
        return requests

    plain, guessed = outputs(None), outputs(Speculation(models / "draft", 3, v2, topk))
    assert [r.output for r in plain] == [r.output for r in guessed]
    for one, other in zip(plain, guessed, strict=True):
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-4)
    if temperature == 0:
        rounds = {n: sum(r.accepted.get(n, 0) for r in guessed) for n in range(4)}
        assert sum(rounds.values()) < 3 * 39
        assert min(rounds.values()) > 0


@pytest.mark.parametrize("v2", [False, True])
def test_a_turn_inherits_exactly_the_visible_history(v2: bool, models: Path, rng: random.Random) -> None:
    client = start(models / "full", speculation=Speculation(models / "draft", 3, v2))
    session, length = client.open(), 0
    for turn_length in (12, 13, 14, 15, 16, 17):
        turn = client.send(tokens(rng, 7), turn_length, session)
        client.drain()
        assert turn.cached in (length, max(0, length - 1))
        length = len(turn.prompt) + len(turn.output)
        assert len(turn.output) == turn_length


def test_the_sliding_window_gives_its_pages_back_while_a_request_runs(models: Path, rng: random.Random) -> None:
    client = start(models / "swa", page_size=4)
    client.send(tokens(rng, 20), 200)
    client.steps(150)
    accounts = client.scheduler.check.accounts()
    assert accounts["full"].uncached > 100
    assert accounts["swa"].uncached < 24 + 3 * 4
    client.drain()
    assert client.used == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"page_size": 16, "chunk": 40}, "--chunked-prefill-size: expected a multiple"),
        ({"page_size": 256, "pool": 100, "chunk": 256}, "--max-total-tokens: expected at least one page"),
        ({"speculation": (3, True, 2, 9)}, "--speculative-num-draft-tokens: expected 3 to 7"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, Any], text: str, models: Path) -> None:
    if "speculation" in changes:
        changes = {"speculation": Speculation(models / "draft", *changes["speculation"])}
    with pytest.raises(OptionError, match=text):
        start(models / "full", **changes)
