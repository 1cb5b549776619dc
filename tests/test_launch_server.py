"""A server from start to stop, started or attached to; every error is one paragraph with the log's end."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_helpers import FakeEngine, cell, eventually

from pytest_kvcheck.cells import Features, Model
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.launch import readiness
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.observe import residue


def start(folder: Path, *traits: str, settle: float = 15.0, what: Any = None, **options: Any) -> Server:
    engine = FakeEngine(folder, *traits, **options)
    return Server.start(
        engine, what or cell(), python=sys.executable, artifacts_dir=folder / "artifacts", settle=settle
    )


def test_a_slow_start_is_waited_for_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "slow") as server:
        assert server.alive()
        assert server.exit_status() is None
        assert server.info["engine"] == "fake"
        assert Path(server.info["tmpdir"]).is_dir()
        assert server.log_tail(10)[:2] == ["hello from the first byte", "serving"]
        assert server.first_fatal() is None
        facts = server.facts()
        assert (facts.alive, facts.stopped, facts.attached) == (True, False, False)
        assert facts.fds_before is not None
        assert facts.rss_after is not None
        port = server.port
    facts = server.stop()
    assert (facts.alive, facts.stopped, facts.exit_code) == (True, True, 0)
    assert (facts.leftover_processes, facts.port_still_open, facts.stop_forced) == ((), False, False)
    assert server.facts() is facts
    assert residue.listener(port) is None
    assert not Path(server.info["tmpdir"]).exists()
    assert server.log_tail(1) == ["FATAL a child has ended"]
    assert server.first_fatal() is None  # our stop brought it about
    assert server.log_events() == []


def test_a_server_that_dies_at_start_fails_with_status_tail_and_first_fatal_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        start(tmp_path, "dies", ready_deadline=600)
    error = caught.value
    assert error.exit_status == 7
    assert error.tail[-2:] == ("RuntimeError: no kernel for this card", "FATAL scheduler is going down")
    assert "ended with exit status 7 before it was ready" in error.paragraph
    assert "m.yaml:7:3" in error.paragraph
    assert ".log:3): FATAL scheduler is going down" in error.paragraph
    assert str(error.log_path) in str(error)


def test_a_server_that_is_killed_at_start_names_the_signal(tmp_path: Path) -> None:
    command = ("sh", "-c", "kill -9 $$")

    class Killed(FakeEngine):
        def launch_spec(self, inputs: Any) -> Any:
            spec = super().launch_spec(inputs)
            return type(spec)(command, spec.env)

    with pytest.raises(LaunchError, match=r"ended with signal 9 \(SIGKILL\)"):
        Server.start(Killed(tmp_path), cell(), python=sys.executable, artifacts_dir=tmp_path)


def test_a_server_that_never_gets_ready_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"not ready within 2 s at http://127.0.0.1:\d+ \(nothing listens"):
        start(tmp_path, "never", ready_deadline=2, stop_grace=5)


def test_a_fatal_line_ends_the_wait_though_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FATAL_PATIENCE", 0.5)
    with pytest.raises(LaunchError, match="printed a fatal line and neither ended nor got ready"):
        start(tmp_path, "fatal-and-hangs", ready_deadline=600, stop_grace=5)


def test_a_garbled_answer_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"answers, but not as fake does: .*expected JSON, found '<html>"):
        start(tmp_path, "garbage")


def test_flags_that_did_not_arrive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="page_size 1 expected, 256 found"):
        start(tmp_path, page=256)


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path)
    with pytest.raises(LaunchError, match=r"--kvcheck-python: expected .* found no such file: /no/python"):
        Server.start(engine, cell(), python="/no/python", artifacts_dir=tmp_path)
    (tmp_path / "python").touch()
    with pytest.raises(LaunchError, match="found a file that may not be executed"):
        Server.start(engine, cell(), python=str(tmp_path / "python"), artifacts_dir=tmp_path)


def test_an_interpreter_without_the_engine(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"cell baseline \(m.yaml:7:3\): fake is not installed in .*pip install"
    ):
        start(tmp_path, installed=False)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cell baseline .*does not exist"):
        start(tmp_path, what=cell(model=Model(str(tmp_path / "no" / "model"))))


def test_a_port_taken_by_a_foreign_process_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        with pytest.raises(LaunchError, match="a port was taken by another process"):
            start(tmp_path, "address", port=port)


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """A server that somebody else started, with its output in a file."""
    engine = FakeEngine(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path / "by_hand.log"
    with log.open("wb") as file:
        server = subprocess.Popen([sys.executable, str(engine.script), str(port)], stdout=file, stderr=file)
    assert eventually(lambda: residue.listener(port) is not None)
    yield port, server, log
    server.kill()
    server.wait(60)


def test_a_stale_server_at_our_port_is_not_taken_for_ours(
    tmp_path: Path, by_hand: tuple[int, subprocess.Popen[bytes], Path]
) -> None:
    port, server, _ = by_hand

    class Fooled(FakeEngine):
        def ready(self, control: Control) -> bool:
            return Control(f"http://127.0.0.1:{port}").get("/health").ok

    class Startup(readiness.Startup):
        def check_ours(self) -> None:
            self.port = port
            super().check_ours()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_kvcheck.launch.server.Startup", Startup)
        with pytest.raises(LaunchError, match=rf"not what answers at port {port}: that is pid {server.pid}"):
            Server.start(Fooled(tmp_path), cell(), python=sys.executable, artifacts_dir=tmp_path)


def test_what_happens_after_the_start_is_seen(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        line = server.log_line
        origin = time.monotonic()
        server.control.get("/say")
        (event,) = server.log_events(line, origin)
        assert (event.rule, event.fields) == ("retract", {"count": 3})
        assert 0 <= event.t < 60
        assert server.log_events(server.log_line) == []
        server.mark()
        for _ in range(5):
            server.control.get("/leak-fd")
        facts = server.facts()
        assert facts.fds_before is not None
        assert facts.fds_after is not None
        assert facts.fds_after - facts.fds_before >= 5


def test_a_helper_that_comes_late_brings_descriptors_that_nobody_leaked(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.mark()
        server.control.get("/helper")
        facts = server.facts()
        assert facts.fds_before is not None
        assert facts.fds_after is not None
        assert facts.fds_after - facts.fds_before < 30
        server.mark()
        server.control.get("/leak-fd")
        later = server.facts()
        assert later.fds_before is not None
        assert later.fds_before >= facts.fds_after + 90


def test_a_crash_between_two_requests_is_a_fact(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.control.get("/crash")
        assert eventually(lambda: not server.alive())
        fatal = server.first_fatal()
        assert fatal is not None
        assert fatal.text == "FATAL crashed in flight"
        assert server.exit_status() == 9
        assert (server.facts().alive, server.facts().exit_code) == (False, 9)
    assert (server.facts().alive, server.facts().exit_code, server.facts().stop_forced) == (False, 9, False)


def test_a_server_that_ignores_term_is_killed_and_that_is_said(tmp_path: Path) -> None:
    server = start(tmp_path, "ignores-term", "child", stop_grace=1)
    facts = server.stop()
    assert (facts.exit_code, facts.stop_forced, facts.leftover_processes) == (-signal.SIGKILL, True, ())


@pytest.mark.parametrize("trait", ["child-ignores-term", "child-other-session", "daemon"])
def test_a_child_that_outlives_its_server_is_a_leftover(trait: str, tmp_path: Path) -> None:
    server = start(tmp_path, trait, settle=1)
    assert eventually(lambda: len(server.snapshot().processes) == 2)
    child = max(server.snapshot().pids - {server.pid})
    assert eventually(lambda: "ignores" in server.log_tail())
    facts = server.stop()
    assert [text.split()[1] for text in facts.leftover_processes] == [str(child)]
    assert not psutil.pid_exists(child)


def test_a_child_that_heeds_the_groups_term_is_no_leftover(tmp_path: Path) -> None:
    assert start(tmp_path, "child").stop().leftover_processes == ()


def test_every_launch_has_a_log_of_its_own(tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        with start(tmp_path, what=cell(name="a/b c")) as server:
            paths.append(server.log_path)
    assert len(set(paths)) == 2
    assert all(path is not None and path.parent == tmp_path / "artifacts" for path in paths)


def test_a_fork_of_ours_does_not_stop_the_server(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the log's thread lives; the fork only exits
            pid = os.fork()
        if pid == 0:
            server.stop()
            os._exit(0)
        os.waitpid(pid, 0)
        assert server.control.get("/health").ok


def test_attach_watches_process_and_log_and_leaves_the_server_running(
    tmp_path: Path, by_hand: tuple[int, subprocess.Popen[bytes], Path]
) -> None:
    port, process, log = by_hand
    with Server.attach(FakeEngine(tmp_path), f"http://127.0.0.1:{port}/", cell()) as server:
        assert (server.attached, server.alive(), server.pid) == (True, True, process.pid)
        assert server.log_path == log
        line = server.log_line
        assert line >= 2  # what was there before is counted
        server.control.get("/say")
        assert [event.rule for event in server.log_events(line)] == ["retract"]
        facts = server.facts()
        assert facts.attached
        assert facts.fds_after is not None
        assert facts.rss_after is not None
    assert not server.stop().stopped
    assert process.poll() is None


def test_attach_says_what_does_not_fit_and_sees_a_death(
    tmp_path: Path, by_hand: tuple[int, subprocess.Popen[bytes], Path]
) -> None:
    port, process, _ = by_hand
    other = cell(features=Features(page_size=16))
    with Server.attach(FakeEngine(tmp_path), f"http://127.0.0.1:{port}", other) as server:
        assert server.misfits == ["page_size 16 expected, 1 found"]
        process.kill()
        assert eventually(lambda: not server.alive())
        assert (server.facts().alive, server.facts().exit_code) == (False, None)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://10.1.2.3:8000", "expected a server on this machine"),
        ("http://127.0.0.1:notaport", "--kvcheck-url: expected a port"),
        ("127.0.0.1:8000", r"expected http://127\.0\.0\.1:PORT"),
        ("http://127.0.0.1:8000/v1", "expected the root URL"),
    ],
)
def test_attach_to_a_url_that_is_none(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=message):
        Server.attach(FakeEngine(tmp_path), url, cell())


def test_attach_to_nobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(
        LaunchError,
        match=rf"--kvcheck-url {url}: expected .* connection refused.* Next: start the server",
    ):
        Server.attach(FakeEngine(tmp_path), url, cell(), timeout=1)


class _Says(http.server.BaseHTTPRequestHandler):
    """Answers every request with the status of its class, as a web server that is no inference server may."""

    status = 404

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"no such page")

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(status: int) -> Iterator[str]:
    handler = type("Says", (_Says,), {"status": status})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "found", "step"),
    [
        (404, "found HTTP 404 .*: 'no such page'", "give the root URL of a fake server"),
        (500, "found HTTP 500", "see the server's log"),
        (503, "found HTTP 503, not ready", "wait until the server says"),
        (200, "found a server in health that does not answer as fake does", "--kvcheck-engine"),
    ],
)
def test_attach_says_what_answers_instead(
    status: int, found: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "ready", lambda self, control: False)
    with serving(status) as url, pytest.raises(LaunchError, match=f"{found}.*Next: .*{step}"):
        Server.attach(FakeEngine(tmp_path), url, cell(), timeout=0.2)


def test_attach_with_tls_to_a_plain_server_and_to_one_that_hangs_up(tmp_path: Path) -> None:
    with serving(200) as url, pytest.raises(LaunchError, match=r"found no TLS at 127.*Next: give http://"):
        Server.attach(FakeEngine(tmp_path), url.replace("http:", "https:"), cell(), timeout=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        closing = threading.Event()

        def hang_up() -> None:
            listener.settimeout(0.1)
            while not closing.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(LaunchError, match="closed the connection without an HTTP answer") as caught:
                Server.attach(FakeEngine(tmp_path), f"http://127.0.0.1:{port}", cell(), timeout=0.2)
        finally:
            closing.set()
            thread.join()
    for raw in ("urllib3", "Errno", "HTTPConnectionPool", "Max retries"):
        assert raw not in str(caught.value)


def test_a_server_that_nobody_stops_ends_with_the_interpreter(tmp_path: Path) -> None:
    code = """
import sys
import threading
from pathlib import Path
from launch_helpers import FakeEngine, cell
from pytest_kvcheck.launch.server import Server
folder = Path(sys.argv[1])
engine = FakeEngine(folder, "daemon")
server = Server.start(engine, cell(), python=sys.executable, artifacts_dir=folder, settle=1)
print(server.port)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert residue.listener(int(done.stdout)) is None
