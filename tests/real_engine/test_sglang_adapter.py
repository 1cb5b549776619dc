"""The adapter against the real SGLang: one server, every shape of answer, every source of its account."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from real_engine_helpers import DEVICE, REPOSITORY

from pytest_kvcheck.cells import Cell, Features, Model, Position, Retract
from pytest_kvcheck.engines.sglang import SglangEngine
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import Reply

pytestmark = [pytest.mark.real_engine, pytest.mark.slow]
CELL = Cell(
    name="adapter",
    family="llama",
    engine="sglang",
    model=Model(str(REPOSITORY / "fixtures" / "models" / "tiny-llama")),
    features=Features(
        chunked_prefill=128, context_length=1024, pool_tokens=4096, max_running=8, retract=Retract(3)
    ),
    at=Position("adapter", 1, 1),
    device=DEVICE,  # type: ignore[arg-type]
)


class Client:
    """One request at a time, through the adapter's own calls and parser."""

    def __init__(self, server: Server) -> None:
        self.server, self.engine, self.count = server, server.engine, 0

    def call(self, call: Any) -> requests.Response:
        return requests.request(
            call.method, self.server.base_url + call.path, json=call.json, timeout=120, stream=False
        )

    def ask(self, kind: Any, ids: range, session: str | None = None, **fields: Any) -> Reply:
        self.count += 1
        base = {
            "id": self.count,
            "kind": kind,
            "input_ids": tuple(i % 500 for i in ids),
            "max_new_tokens": 6,
            "session": session,
        }
        op = Operation(**{**base, **fields})
        answer = self.call(self.engine.request_call(op, f"adapter-{self.count:06d}", session, []))
        parser = self.engine.reply_parser(op, 0)
        bodies = [answer.content]
        if op.stream:
            lines = answer.content.split(b"\n\n")
            bodies = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")] or bodies
        for body in bodies:
            parser.feed(body)
        return parser.finish(answer.status_code)

    def open(self, session: str) -> None:
        call = self.engine.open_call(Operation(id=0, kind="open"), session)
        assert self.call(call).json() == session

    def close(self, session: str) -> None:
        assert self.call(self.engine.close_call(session)).status_code == 200

    def account(self) -> Any:
        line = self.server.log_line
        tokens = self.engine.rules(CELL).refresh_tokens
        assert self.ask("generate", range(5, 9), max_new_tokens=tokens).finish == "length"
        return self.engine.account(self.server.control, 0.0, self.server.log_events(line))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    artifacts: Path = tmp_path_factory.mktemp("sglang")
    python = os.environ["KVCHECK_SGLANG_PYTHON"]
    with Server.start(SglangEngine(), CELL, python=python, artifacts_dir=artifacts) as server:
        yield Client(server)


def test_the_server_is_what_the_cell_asks_for(client: Client) -> None:
    assert client.server.misfits == []
    assert client.engine.version
    python = os.environ["KVCHECK_SGLANG_PYTHON"]
    assert client.engine.installed_version(python) == client.engine.version
    assert sys.executable != python


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["none", "output", "input"])
def test_generate(client: Client, stream: bool, mode: str) -> None:
    reply = client.ask("generate", range(20, 50), stream=stream, logprobs=mode)
    assert (reply.finish, len(reply.output_ids), reply.prompt_tokens, reply.faults) == ("length", 6, 30, [])
    assert (reply.output_logprobs is None) == (mode == "none")
    if mode == "input":
        assert reply.input_logprobs is not None
        assert (len(reply.input_logprobs), reply.input_start) == (30, 0)


@pytest.mark.parametrize("new", [0, 1])
def test_score(client: Client, new: int) -> None:
    reply = client.ask("score", range(20, 50), stream=False, max_new_tokens=new)
    assert (reply.finish, reply.faults) == ("length", [])
    assert reply.top_logprobs is not None
    assert reply.input_logprobs is not None
    pairs = zip(reply.input_logprobs[1:], reply.top_logprobs[1:], strict=True)
    assert all(own is not None and top is not None and own <= top + 1e-5 for own, top in pairs)


def test_a_session_keeps_its_history_and_gives_it_back(client: Client) -> None:
    client.open("keeps")
    history = 0
    for turn in range(3):
        reply = client.ask("turn", range(30 + turn, 47 + turn), "keeps", logprobs="output")
        low, high = client.engine.expected_cached(history, history + 17, CELL)
        assert (reply.finish, reply.prompt_tokens, reply.faults) == ("length", history + 17, [])
        assert reply.retractions or low <= (reply.cached_tokens or 0) <= high
        history += 17 + 6
    held = client.account()
    assert held.sessions == 1
    assert held.pool("full").used == history - 1
    client.close("keeps")
    # The gauge moves with a batch, and a busy machine may read it before that one's is published.
    rest = next((one for _ in range(10) if not (one := client.account()).sessions), client.account())
    full = rest.pool("full")
    assert (rest.sessions, rest.missing, rest.error) == (0, [], "")
    assert (full.used, full.protected, full.session_held, full.uncached) == (0, 0, 0, 0)
    assert full.available + full.evictable == full.total == 4096


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("ids", "fields"),
    [
        (range(20, 40), {"invalid": "offset"}),
        (range(20, 40), {"invalid": "replace"}),
        (range(20, 40), {"invalid": "drop_previous_output"}),
        (range(1200), {}),
    ],
)
def test_what_a_session_must_refuse_is_rejected_and_leaves_it_as_it_was(
    client: Client, stream: bool, ids: range, fields: dict[str, Any]
) -> None:
    client.open("refuses")
    first = client.ask("turn", range(30, 47), "refuses")
    refused = client.ask("turn", ids, "refuses", stream=stream, **fields)
    assert (refused.finish, refused.output_ids, refused.faults) == ("rejected", [], [])
    assert refused.message
    then = client.ask("turn", range(50, 60), "refuses")
    client.close("refuses")
    assert then.prompt_tokens == (first.prompt_tokens or 0) + 6 + 10


def test_a_session_that_is_not_there_is_rejected(client: Client) -> None:
    assert client.ask("turn", range(20, 30), "never-opened").finish == "rejected"


def test_retraction_is_told_by_replies_by_the_log_and_by_a_counter(client: Client) -> None:
    from concurrent.futures import ThreadPoolExecutor

    line = client.server.log_line
    with ThreadPoolExecutor(4) as pool:
        replies = list(
            pool.map(lambda n: client.ask("generate", range(60 + n, 90 + n), max_new_tokens=30), range(4))
        )
    assert {reply.finish for reply in replies} == {"length"}
    told = sum(reply.retractions or 0 for reply in replies)
    logged = [event for event in client.server.log_events(line) if event.meaning == "retract"]
    assert told > 0
    assert sum(int(event.fields["count"]) for event in logged) == told
    assert client.account().retracted_total >= told
