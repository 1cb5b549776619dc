"""A call that is repeated while a workload runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pytest_kvcheck.client.calls import Call
from pytest_kvcheck.engines import provoke
from pytest_kvcheck.engines.provoke import Provoker


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A server that refuses everything, and the paths that it was asked for."""
    monkeypatch.setattr(provoke, "FIRST_PAUSE", 0.01)
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", asked
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_the_call_is_repeated_until_the_end_whatever_is_answered(server: tuple[str, list[str]]) -> None:
    url, asked = server
    with Provoker(url, Call("POST", "/again")) as provoker:
        deadline = time.monotonic() + 60
        while len(asked) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert set(asked) == {"/again"}
    count = len(asked)
    assert provoker.sent == count >= 3
    time.sleep(0.1)
    assert len(asked) == count


def test_without_a_call_nothing_is_sent(server: tuple[str, list[str]]) -> None:
    with Provoker(server[0], None) as provoker:
        time.sleep(0.05)
    assert provoker.sent == 0
    assert server[1] == []


def test_a_server_that_is_gone_is_no_error() -> None:
    with Provoker("http://127.0.0.1:1", Call("POST", "/again")):
        time.sleep(0.05)
