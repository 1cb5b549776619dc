"""Every planted fault shows as what the table says, and the same traffic without it shows nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_helpers import (
    VOCAB,
    Client,
    tokens,
    worst_difference,
    write_draft,
    write_model,
    write_swa_model,
)

from pytest_kvcheck.reference.engine import Options, Speculation
from pytest_kvcheck.reference.faults import TABLE, Faults
from pytest_kvcheck.reference.memcheck import MemoryFault
from pytest_kvcheck.reference.scheduler import Rejected

Scenario = Callable[[Client, random.Random], str]
SCENARIOS: dict[str, tuple[dict[str, Any], str, Scenario]] = {}


def scenario(symptom: str, **options: Any) -> Callable[[Scenario], Scenario]:
    """Registers traffic for the fault named as the function; ``symptom`` begins what the strict check or the
    client says of it."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__.replace("_", "-")] = (options, symptom, function)
        return function

    return register


def two_turns(client: Client, rng: random.Random) -> tuple[str, Any]:
    session = client.open()
    first = client.send(tokens(rng, 20), 8, session)
    client.drain()
    return session, first


@scenario("Full Pool Mem Leak", retract_interval=3)
def retract_tail(client: Client, rng: random.Random) -> str:
    for _ in range(3):
        client.send(tokens(rng, 30), 12)
    client.drain()
    return ""


@scenario("Full Pool Mem Leak")
def stale_tail_on_next_turn(client: Client, rng: random.Random) -> str:
    session, _ = two_turns(client, rng)
    turn = client.send(tokens(rng, 10), 30, session)
    client.steps(8)
    client.scheduler.abort(turn.rid)
    client.send(tokens(rng, 10), 4, session)
    client.drain()
    return ""


@scenario("req_to_token_pool memory leak detected!available_size=7", chunk=32)
def abort_queued_row(client: Client, rng: random.Random) -> str:
    client.send(tokens(rng, 200), 2)
    queued = client.send(tokens(rng, 30), 2)
    client.steps(2)
    client.scheduler.abort(queued.rid)
    client.drain()
    return ""


@scenario("Full Pool Mem Leak", chunk=32)
def abort_prefill_chunk(client: Client, rng: random.Random) -> str:
    chunked = client.send(tokens(rng, 200), 2)
    client.steps(3)
    client.scheduler.abort(chunked.rid)
    client.send(tokens(rng, 10), 2)
    client.drain()
    return ""


@scenario("prompt_tokens")
def aborted_turn_kept_as_history(client: Client, rng: random.Random) -> str:
    session, first = two_turns(client, rng)
    turn = client.send(tokens(rng, 10), 30, session)
    client.steps(8)
    client.scheduler.abort(turn.rid)
    last = client.send(tokens(rng, 10), 4, session)
    client.drain()
    expected = len(first.prompt) + len(first.output) + 10
    return "" if len(last.prompt) == expected else f"prompt_tokens {len(last.prompt)}, expected {expected}"


@scenario("used")
def lock_never_released(client: Client, rng: random.Random) -> str:
    client.send(tokens(rng, 30), 4)
    client.drain()
    return f"used {client.used}" if client.used else ""


@scenario("Full Pool Mem Leak", page_size=16, chunk=64)
def double_free(client: Client, rng: random.Random) -> str:
    session, _ = two_turns(client, rng)
    client.scheduler.close_session(session)
    client.send(tokens(rng, 30), 4)
    client.drain()
    return ""


@scenario("Full Pool Mem Leak")
def close_in_flight_leak(client: Client, rng: random.Random) -> str:
    session, _ = two_turns(client, rng)
    client.send(tokens(rng, 10), 8, session)
    client.steps(4)
    client.scheduler.close_session(session)
    client.drain()
    return ""


@scenario("pool memory leak detected!")
def session_timeout_leak(client: Client, rng: random.Random) -> str:
    session = client.open(timeout=30.0)
    client.send(tokens(rng, 20), 8, session)
    client.drain()
    start = client.scheduler.clock()
    client.scheduler.clock = lambda: start + 60
    client.drain()
    return "" if not client.scheduler.sessions.by_id else "the session is still open"


@scenario("cached_tokens")
def cached_tokens_off_by_one(client: Client, rng: random.Random) -> str:
    session, first = two_turns(client, rng)
    turn = client.send(tokens(rng, 10), 4, session)
    client.drain()
    history = len(first.prompt) + len(first.output)
    return "" if turn.cached in (history, history - 1) else f"cached_tokens {turn.cached}, expected {history}"


@scenario("log-prob")
def stale_kv_slot(client: Client, rng: random.Random) -> str:
    session, _ = two_turns(client, rng)
    turn = client.send(tokens(rng, 10), 8, session)
    client.drain()
    worst = worst_difference(client.scheduler.executor.model, turn.prompt, turn)
    return "" if worst < 1e-4 else f"log-prob off by {worst}"


@scenario("stuck")
def health_lies_when_stuck(client: Client, rng: random.Random) -> str:
    aborted = client.send(tokens(rng, 10), 50)
    client.steps(5)
    client.scheduler.abort(aborted.rid)
    after = client.send(tokens(rng, 10), 4)
    client.steps(50)
    return "" if after.finish else "stuck"


def turns(client: Client, rng: random.Random, count: int, max_new: int = 13) -> str:
    """Some turns of one session beside two plain requests; what the client sees wrong in them."""
    session, history = client.open(), 0
    for _ in range(count):
        beside = [client.send(tokens(rng, 25), 24) for _ in range(2)]
        turn = client.send(tokens(rng, 9), max_new, session)
        client.drain()
        if history and not turn.retractions and turn.cached not in (history, history - 1):
            return f"cached_tokens {turn.cached}, expected {history}"
        for request in [turn, *beside]:
            worst = worst_difference(client.scheduler.executor.model, request.prompt, request)
            if worst > 1e-4:
                return f"log-prob off by {worst}"
        history = len(turn.prompt) + len(turn.output)
    client.scheduler.close_session(session)
    client.drain()
    return f"used {client.used}" if client.used else ""


@scenario("cached_tokens", draft=True)
def bonus_slot_race(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 2)


@scenario("KV length error", draft=True, overlap=False)
def bonus_claimed_twice(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 2, max_new=60)


@scenario("cached_tokens", draft=True)
def overshoot_untrimmed(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 6)


@scenario("Full Pool Mem Leak", draft=True, v2=False)
def spec_reject_slots_kept(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 2)


@scenario("KV length error", draft=True, retract_interval=3)
def late_result_after_retract(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 6)


@scenario("Full Pool Mem Leak", page_size=16, chunk=64)
def partial_page_freed(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 2)


@scenario("Full Pool Mem Leak")
def lent_slot_double_count(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 2)


@scenario("SWA Pool Mem Leak", swa=True)
def swa_cursor_uncapped(client: Client, rng: random.Random) -> str:
    session, _ = two_turns(client, rng)
    turn = client.send(tokens(rng, 60), 30, session)
    client.steps(8)
    client.scheduler.abort(turn.rid)
    client.send(tokens(rng, 10), 4, session)
    client.drain()
    return ""


def one_request(client: Client, rng: random.Random, size: int) -> str:
    """A plain prompt of that size; what a forward pass without any cache says against its log-probs."""
    request = client.send(tokens(rng, size), 8)
    client.drain()
    worst = worst_difference(client.scheduler.executor.model, request.prompt, request)
    return "" if worst < 1e-4 else f"log-prob off by {worst}"


@scenario("log-prob", swa=True)
def window_short(client: Client, rng: random.Random) -> str:
    return one_request(client, rng, 60)


@scenario("log-prob")
def rope_clamped(client: Client, rng: random.Random) -> str:
    return one_request(client, rng, 300)


@scenario("cached_tokens", draft=True)
def stop_overshoot_kept(client: Client, rng: random.Random) -> str:
    """Turns that end at a stop id, often in the middle of what was accepted."""
    for _ in range(20):
        session, history = client.open(), 0
        for _ in range(6):
            stop = frozenset(rng.sample(range(3, VOCAB), VOCAB // 6))
            turn = client.send(tokens(rng, 9), 24, session, stop=stop)
            client.drain()
            if history and turn.cached not in (history, history - 1):
                return f"cached_tokens {turn.cached}, expected {history}"
            history = len(turn.prompt) + len(turn.output)
        client.scheduler.close_session(session)
    client.drain()
    return f"used {client.used}" if client.used else ""


@scenario("Full Pool Mem Leak")
def refusal_frees_session(client: Client, rng: random.Random) -> str:
    session, _ = two_turns(client, rng)
    client.send(tokens(rng, 10), 30, session)
    client.steps(4)
    taken = 0
    for _ in range(2):
        with contextlib.suppress(Rejected):
            client.send(tokens(rng, 8), 4, session)
            taken += 1
    client.drain()
    return f"taken: {taken} turns beside one that ran" if taken else ""


@scenario("SWA Pool Mem Leak", swa=True, page_size=32, chunk=64)
def swa_page_ge_window(client: Client, rng: random.Random) -> str:
    return turns(client, rng, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_draft(folder / "draft", write_model(folder / "full"))
    write_swa_model(folder / "swa")
    return folder


def seen(name: str, models: Path, plant: tuple[str, ...], **more: Any) -> str:
    """What the strict check or the client says of the fault's scenario; "" where all is well."""
    options, _, function = SCENARIOS[name]
    settings = {"pool": 4096, "max_running": 8, "context": 512, **options, **more}
    folder = models / ("swa" if settings.pop("swa", False) else "full")
    if settings.pop("draft", False):
        settings["speculation"] = Speculation(models / "draft", 3, settings.pop("v2", True))
    client = Client(Options(folder, streaming_sessions=True, plant=plant, **settings))
    try:
        return function(client, random.Random(3)) or not_given_back(client)
    except MemoryFault as fault:
        return str(fault)


def not_given_back(client: Client) -> str:
    """What is still in use when every session is closed."""
    for session in list(client.scheduler.sessions.by_id):
        client.scheduler.close_session(session)
    client.drain()
    rows = client.scheduler.cache.memory.rows
    if client.used or len(rows.free) != rows.total:
        return f"used {client.used} tokens and {rows.total - len(rows.free)} rows at rest"
    return ""


def test_every_fault_has_a_scenario() -> None:
    assert sorted(SCENARIOS) == sorted(fault.name for fault in TABLE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_planted_fault_shows(name: str, models: Path) -> None:
    assert seen(name, models, (name,)).startswith(SCENARIOS[name][1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_traffic_without_the_fault_shows_nothing(name: str, models: Path) -> None:
    assert seen(name, models, ()) == ""


# Counting twice in the check alone harms nobody: with the check off there is nothing to see.
HARMLESS = {"lent-slot-double-count"}


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - HARMLESS))
def test_silent_engine_lives_and_the_client_sees_it(name: str, models: Path) -> None:
    said = seen(name, models, (name,), silent=True)
    assert said.startswith(("used", "cached_tokens", "prompt_tokens", "log-prob", "stuck", "taken"))


def test_unknown_fault_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--plant: expected one of retract-tail, .*; found 'retract-tial'"):
        Faults(["retract-tial"])
