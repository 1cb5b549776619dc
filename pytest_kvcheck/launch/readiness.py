"""From a started process to a server that may be judged: it answers, it is ours, its flags arrived."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from typing import Any

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines.base import Engine
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.process import EngineProcess
from pytest_kvcheck.observe import residue
from pytest_kvcheck.observe.tail import LogTail

POLL = 0.2
TAIL = 40
# After its first fatal line an engine takes a while to die (SGLang about 5 s); then it will not get ready.
FATAL_PATIENCE = 20.0


def check_interpreter(python: str) -> str:
    """The interpreter's full path. Raises ``LaunchError`` where it is no executable file."""
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        what = "a file that may not be executed" if os.path.exists(python) else "no such file"
        raise LaunchError(
            f"--kvcheck-python: expected the interpreter of the engine's environment, found {what}: {python}; "
            "give for instance /path/to/venv/bin/python"
        )
    return os.path.abspath(found)


def environment(additions: Mapping[str, str | None]) -> dict[str, str]:
    """Our environment with an engine's additions (None removes), and what every server needs."""
    env = dict(os.environ)
    env.pop("PYTEST_CURRENT_TEST", None)
    env["PYTHONUNBUFFERED"] = "1"  # the log must not lag behind what happens
    for name in ("NO_PROXY", "no_proxy"):  # engines warm themselves up over HTTP
        env[name] = ",".join(filter(None, (env.get(name), "127.0.0.1,localhost")))
    for name, value in additions.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


class Startup:
    """One engine that has been started and is not yet known to be ready. Every error is a ``LaunchError``."""

    def __init__(
        self, engine: Engine, cell: Cell, process: EngineProcess, log: LogTail, port: int, control: Control
    ) -> None:
        self.engine = engine
        self.cell = cell
        self.process = process
        self.log = log
        self.port = port
        self.control = control
        self.began = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Poll until the engine is ready; fail at once when it dies, and after ``seconds`` in any case."""
        doomed: float | None = None
        while True:
            if not self.process.alive():
                raise self._died()
            if self.engine.ready(self.control):
                return
            now = time.monotonic()
            if doomed is None and self.log.first_fatal() is not None:
                doomed = now + FATAL_PATIENCE
            if doomed is not None and now > doomed:
                raise self._error("printed a fatal line and neither ended nor got ready", "see the log")
            if now - self.began > seconds:
                raise self._never_ready(seconds)
            self.process.wait(POLL)

    def check_ours(self) -> None:
        """The process that answers must be one that we started, not a stale server of an earlier job."""
        if self.cell.command is not None:
            return  # a container's port is held by another process than ours
        owner = residue.listener(self.port)
        ours = residue.snapshot(self.process.keeper, itself=False).pids
        if owner is None or owner.pids & ours:
            return
        raise self._error(
            f"is not what answers at port {self.port}: that is {owner}",
            "end that process; kvcheck takes another port next time",
        )

    def identify(self) -> dict[str, Any]:
        """The server's own account of itself, its flags checked against the cell."""
        info = ask(self.engine, self.control, self._error)
        wrong = self.engine.misfits(self.cell, info)
        if wrong:
            raise self._error(
                "runs with other flags than the cell asks for: " + "; ".join(wrong),
                "correct the cell's args and env; a verdict about another configuration would be worthless",
            )
        return info

    def _died(self) -> LaunchError:
        self.process.stop(hurry=True)
        self.log.drain(final=True)
        status = self.process.exit_status()
        next_step = "run the command above by hand, or correct the cell"
        if any("ddress already in use" in line for line in self.log.tail(TAIL)):
            owner = residue.listener(self.port)
            who = f"{owner} listens at port {self.port}" if owner else "that listener is gone again"
            next_step = f"a port was taken by another process ({who}); end it and run again"
        return self._error(f"ended with {status_words(status)} before it was ready", next_step, status)

    def _never_ready(self, seconds: float) -> LaunchError:
        owner = residue.listener(self.port)
        answer = self.control.get("/health", timeout=5.0)
        said = f"GET /health gave {answer.status or answer.error}" if owner else "nothing listens there"
        return self._error(
            f"was not ready within {seconds:.0f} s at {self.control.base_url} ({said})",
            "see what it waits for at the end of the log; a slow machine needs a longer ready deadline",
        )

    def _error(self, what: str, next_step: str, status: int | None = None) -> LaunchError:
        self.log.drain()
        fatal = self.log.first_fatal()
        shown = f" First fatal line ({self.log.path}:{fatal.line}): {fatal.text[:500]}." if fatal else ""
        return LaunchError(
            f"cell {self.cell.name} ({self.cell.at}): expected the {self.engine.name} server to get ready; "
            f"after {time.monotonic() - self.began:.1f} s it {what}.{shown} "
            f"Command: {' '.join(self.process.argv)}. Next: {next_step}.",
            tail=self.log.tail(TAIL),
            log_path=self.log.path,
            exit_status=status,
        )


def ask(engine: Engine, control: Control, error: Any) -> dict[str, Any]:
    """``engine.identify``; whatever a garbled answer makes of it is ``error(what, next step)``."""
    try:
        return engine.identify(control)
    except Exception as problem:  # what a server answers must never end as a traceback
        raise error(
            f"answers, but not as {engine.name} does: {type(problem).__name__}: {str(problem)[:500]}",
            "check --kvcheck-engine and what serves that port",
        ) from problem


def not_ready(engine: Engine, control: Control, waited: float) -> tuple[str, str]:
    """What a server that somebody else started showed instead of getting ready, and what to do about it."""
    answer = control.get("/health", timeout=5.0)
    asked = f"(GET /health, tried for {waited:.0f} s)"
    tls = control.base_url.startswith("https:")
    if answer.status is None:
        if "refused" in answer.error:
            step = "start the server, or give the port on which it listens"
        elif tls:
            step = "give http:// and a port that serves plain HTTP"
        elif "closed" in answer.error:
            step = "see what serves that port; it may want TLS, which kvcheck does not speak"
        else:
            step = "see in the server's log whether it is still loading or hangs, then run again"
        return f"{answer.error} {asked}", step
    if answer.ok:
        return (
            f"a server in health that does not answer as {engine.name} does {asked}",
            "name the engine that runs there with --kvcheck-engine (reference, sglang or vllm), or give the "
            "port of one",
        )
    if answer.status == 503:
        return f"HTTP 503, not ready {asked}", "wait until the server says that it is ready, then run again"
    words = " ".join(answer.text.split())[:120]
    said = f"HTTP {answer.status} {asked}" + (f": {words!r}" if words else "")
    if answer.status >= 500:
        return said, "see the server's log; it fails before anything was asked of it"
    return said, f"give the root URL of a {engine.name} server; what answers there has no /health"


def status_words(status: int | None) -> str:
    """An exit status for a person: ``exit status 1``, ``signal 9 (SIGKILL)``."""
    if status is None:
        return "an exit status that no one saw"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"
