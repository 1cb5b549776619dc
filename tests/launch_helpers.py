"""Small fake engines: scripts that act as servers, and the adapter that starts them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pytest_kvcheck.cells import Cell, DeviceName, Features, Model, Position
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines.base import Call, Engine, LaunchInputs, LaunchSpec, ReplyParser, Rules
from pytest_kvcheck.observe.logs import LogEvent, LogRule
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import GaugeSample

# A server that answers /health and /info; argv: port, then what else it does.
SERVER = r"""
import http.server, json, os, signal, subprocess, sys, time
port, traits = int(sys.argv[1]), sys.argv[2:]
print("hello from the first byte", flush=True)
ORPHAN = "import time; time.sleep(600)"
IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ignores', flush=True); " + ORPHAN
if "slow" in traits:
    time.sleep(2)
if "dies" in traits:
    print("RuntimeError: no kernel for this card", file=sys.stderr)
    print("FATAL scheduler is going down", file=sys.stderr)
    sys.exit(7)
if "fatal-and-hangs" in traits:
    print("FATAL scheduler is going down", flush=True)
    time.sleep(600)
if "never" in traits:
    time.sleep(600)
if "address" in traits:
    print("OSError: [Errno 98] Address already in use", flush=True)
    sys.exit(1)
if "child" in traits:
    subprocess.Popen([sys.executable, "-c", ORPHAN])
if "child-ignores-term" in traits:
    subprocess.Popen([sys.executable, "-c", IGNORES])
if "child-other-session" in traits:
    subprocess.Popen([sys.executable, "-c", IGNORES], start_new_session=True)
if "daemon" in traits and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", IGNORES])
    os._exit(0)
if "ignores-term" in traits:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    # As a server does: end at TERM, leaving the children to themselves.
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"FATAL a child has ended\n"), os._exit(0)))

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/crash":
            print("FATAL crashed in flight", flush=True)
            os._exit(9)
        if self.path == "/helper":
            opens = "held = [open('/dev/null') for _ in range(90)]; print('', flush=True); " + ORPHAN
            self.server.helper = subprocess.Popen([sys.executable, "-c", opens], stdout=subprocess.PIPE)
            self.server.helper.stdout.readline()
        if self.path == "/leak-fd":
            self.server.kept.append(open("/dev/null"))
        body = b"<html>not json</html>" if "garbage" in traits else json.dumps(
            {"engine": "fake", "page_size": int(os.environ.get("FAKE_PAGE", "1")),
             "tmpdir": os.environ.get("TMPDIR")}).encode()
        if self.path == "/say":
            print("retract: 3 requests", flush=True)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.kept = []
print("serving", flush=True)
server.serve_forever()
"""

RULES = (
    LogRule("going-down", re.compile(r"FATAL .*"), "fatal", "K22"),
    LogRule("retract", re.compile(r"retract: (?P<count>\d+)"), "retract"),
)


def cell(name: str = "baseline", **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "name": name,
        "family": "fake",
        "engine": "reference",
        "model": Model("fake-owner/fake-model"),
        "features": Features(),
        "at": Position("m.yaml", 7, 3),
    }
    return Cell(**{**values, **changes})


class FakeEngine(Engine):
    """Starts ``SERVER`` with some traits."""

    name = "fake"

    def __init__(
        self,
        folder: Path,
        *traits: str,
        page: int = 1,
        ready_deadline: float = 120.0,
        stop_grace: float = 60.0,
        installed: bool = True,
        port: int | None = None,
    ) -> None:
        super().__init__()
        self.script = folder / "fake_server.py"
        self.script.write_text(SERVER)
        self.traits = traits
        self.page = page
        self.ready_deadline = ready_deadline
        self.stop_grace = stop_grace
        self.installed = installed
        self.port = port

    def unsupported(self, cell: Cell, device: DeviceName, version: str) -> str | None:
        return None

    def installed_version(self, python: str) -> str:
        if not self.installed:
            raise LookupError(f"fake is not installed in {python}: pip install fake")
        return "1.0"

    def launch_spec(self, inputs: LaunchInputs) -> LaunchSpec:
        argv = (inputs.python, str(self.script), str(self.port or inputs.port), *self.traits)
        return LaunchSpec(argv, {"FAKE_PAGE": str(self.page)}, self.ready_deadline, self.stop_grace)

    def ready(self, control: Control) -> bool:
        return control.get("/health").ok

    def identify(self, control: Control) -> dict[str, Any]:
        info: dict[str, Any] = control.get("/info").json()
        self.version = "1.0"
        return info

    def misfits(self, cell: Cell, info: Mapping[str, Any]) -> list[str]:
        expected = cell.features.page_size
        return (
            []
            if info["page_size"] == expected
            else [f"page_size {expected} expected, {info['page_size']} found"]
        )

    def rules(self, cell: Cell) -> Rules:
        return Rules()

    def open_call(self, op: Operation, session_id: str) -> Call | None:
        return None

    def close_call(self, session_id: str) -> Call | None:
        return None

    def request_call(self, op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call:
        raise NotImplementedError

    def reply_parser(self, op: Operation, history: int) -> ReplyParser:
        raise NotImplementedError

    def abort_call(self, rid: str | None) -> Call | None:
        return None

    def flush_call(self) -> Call:
        return Call("POST", "/flush")

    def expected_cached(self, previous: int, sent: int, cell: Cell) -> tuple[int, int]:
        return previous, previous

    def log_rules(self) -> Sequence[LogRule]:
        return RULES

    def sample(self, control: Control, t: float) -> GaugeSample:
        return GaugeSample(t=t, source="fake")

    def account(self, control: Control, t: float, recent: Sequence[LogEvent]) -> GaugeSample:
        return GaugeSample(t=t, source="fake")


def marked(mark: str) -> list[psutil.Process]:
    """Every living process with ``KVCHECK_TEST_MARK=mark`` in its environment: all that a launch started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if process.environ().get("KVCHECK_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether the condition came true within a generous bound."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
