from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from client_helpers import FakeEngine, FakeParser
from fake_server import FakeServer

from pytest_kvcheck.client.http import Flight, LoadClient
from pytest_kvcheck.client.lag import LagMonitor
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import Clock, Reply


def ask(url: str, deadline: float = 30.0, **fields: Any) -> Reply:
    """One generate request against a server."""
    op = Operation(id=0, kind="generate", input_ids=(11, 12), max_new_tokens=4, **fields)

    async def run() -> Reply:
        async with LoadClient(url) as client:
            call = FakeEngine().request_call(op, "r" * 32, None, [])
            return await client.request(call, FakeParser(), stream=op.stream, deadline=deadline)

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_good_reply_has_its_tokens_and_no_fault(stream: bool) -> None:
    with FakeServer() as server:
        reply = ask(server.url, stream=stream)
    assert (reply.finish, reply.output_ids, reply.http_status) == ("length", [23, 34, 45, 56], 200)
    assert reply.faults == []
    assert reply.events == (4 if stream else 0)


@pytest.mark.parametrize(
    ("how", "finish", "words"),
    [
        ("500", "error", "out of slots"),
        ("400", "rejected", "not allowed"),
        ("reset", "error", "the server closed the connection"),
        ("hang", "timeout", "no reply, then nothing more within 0.3 s"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_fails_is_quoted(how: str, finish: str, words: str, stream: bool) -> None:
    with FakeServer(lambda body: how) as server:
        reply = ask(server.url, deadline=0.3 if how == "hang" else 30.0, stream=stream)
    assert reply.finish == finish
    assert words in reply.message
    assert reply.faults == []


def test_a_stream_without_its_end_mark_is_a_fault() -> None:
    with FakeServer(lambda body: "truncate") as server:
        reply = ask(server.url)
    assert reply.faults == ["the stream ended without its end mark after 4 events"]
    assert reply.output_ids == [23, 34, 45, 56]


def test_a_stream_cut_inside_an_event_is_an_error_that_says_where() -> None:
    with FakeServer(lambda body: "cut") as server:
        reply = ask(server.url)
    assert reply.finish == "error"
    assert reply.faults == ["the stream ended without its end mark after 1 events, 20 bytes into another event"]
    assert reply.output_ids == [23]


def test_garbage_and_html_are_faults() -> None:
    with FakeServer(lambda body: "garbage") as server:
        reply = ask(server.url)
        assert reply.finish == "error"
        assert len(reply.faults) == 4
    with FakeServer(lambda body: "html") as server:
        reply = ask(server.url)
        assert reply.finish == "error"
        assert "expected a stream of server-sent events, found content type 'text/html'" in reply.faults


def test_a_connection_left_open_behind_the_end_mark_does_not_hold_the_client() -> None:
    with FakeServer(lambda body: "linger") as server:
        reply = ask(server.url, deadline=300.0)
    assert (reply.finish, reply.faults) == ("length", [])


def test_nobody_listening() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        reply = ask(f"http://127.0.0.1:{held.getsockname()[1]}")
    assert reply.finish == "error"
    assert reply.http_status is None
    assert "no connection to 127.0.0.1" in reply.message
    assert "refused" in reply.message


def test_bytes_that_are_not_http() -> None:
    async def run() -> Reply:
        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(b"\x00\x01 what?\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with LoadClient(f"http://127.0.0.1:{port}") as client:
                call = FakeEngine().flush_call()
                return (await client.call(call, 30.0))[0]

    reply = asyncio.run(run())
    assert reply.finish == "error"
    assert "no reply:" in reply.message


def test_only_loopback_is_spoken_to() -> None:
    with pytest.raises(ValueError, match=r"found host 'example\.org'"):
        LoadClient("http://example.org:80")


def test_a_proxy_from_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with FakeServer() as server:
        assert ask(server.url).finish == "length"


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_cut_closes_the_socket_at_the_token(tokens: int) -> None:
    async def run(url: str) -> tuple[Reply, int]:
        op = Operation(id=0, kind="generate", input_ids=(11,), max_new_tokens=5000)
        flight = Flight()
        async with LoadClient(url) as client:
            call = FakeEngine().request_call(op, "r" * 32, None, [])
            request = asyncio.create_task(
                client.request(call, FakeParser(), stream=True, deadline=60.0, flight=flight)
            )
            assert await flight.reached(tokens)
            flight.cut("disconnected", "left")
            return await request, flight.shown

    with FakeServer(lambda body: "slow") as server:
        reply, shown = asyncio.run(run(server.url))
        assert tokens <= shown < 5000
        assert (reply.finish, reply.message, reply.faults) == ("disconnected", "left", [])
        assert len(reply.output_ids) == shown
        for _ in range(200):
            if server.left:
                break
            asyncio.run(asyncio.sleep(0.02))
        assert server.left == ["r" * 32]


def test_a_request_that_is_not_streamed_counts_as_received_after_a_grace() -> None:
    async def run(url: str) -> tuple[bool, Reply]:
        op = Operation(id=0, kind="generate", input_ids=(11,), max_new_tokens=4, stream=False)
        flight = Flight()
        async with LoadClient(url) as client:
            call = FakeEngine().request_call(op, "r" * 32, None, [])
            request = asyncio.create_task(
                client.request(call, FakeParser(), stream=False, deadline=60.0, flight=flight)
            )
            received = await flight.reached(0)
            flight.cut("disconnected", "left")
            return received, await request

    with FakeServer(lambda body: "hang") as server:
        received, reply = asyncio.run(run(server.url))
    assert received
    assert reply.finish == "disconnected"


def test_a_flight_that_has_ended_is_neither_cut_nor_reached() -> None:
    async def run() -> Flight:
        flight = Flight()
        flight.show(2)
        flight.end()
        flight.cut("timeout", "late")
        assert not await flight.reached(1)
        return flight

    assert asyncio.run(run()).cut_as is None


def test_a_blocked_event_loop_shows_as_lag() -> None:
    import time

    async def run() -> tuple[float, float]:
        clock = Clock()
        async with LagMonitor(clock) as lag:
            await asyncio.sleep(0.1)
            before = clock.now()
            time.sleep(0.5)
            blocked = lag.worst(before)  # the monitor has not even woken yet
            await asyncio.sleep(0.2)
            return blocked, lag.worst(before)

    now, later = asyncio.run(run())
    assert now >= 0.3
    assert later >= 0.3
