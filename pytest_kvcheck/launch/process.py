"""One engine process, kept by a warden (:mod:`pytest_kvcheck.launch.warden`) so that nothing outlives us."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcheck.launch import warden
from pytest_kvcheck.launch.errors import LaunchError

START_BOUND = 60.0  # for the warden alone; it starts in 0.1 s where the machine is not starved


@dataclass(frozen=True, slots=True)
class Ending:
    """How an engine ended. ``status``: its exit code, negative for a signal, None where no one could see it.

    ``forced``: it did not end within the grace after TERM. ``leftovers``: processes that outlived it by the
    settle time and had to be killed. ``stuck``: those that SIGKILL has not ended either.
    """

    status: int | None
    forced: bool = False
    leftovers: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()


class EngineProcess:
    """Starts ``argv`` with exactly ``env``; its output is in ``log_path`` from the first byte.

    ``grace``: seconds between TERM and KILL. ``settle``: seconds that its children may outlive it.
    ``temporary``: a folder that goes with it, however it ends. Raises ``LaunchError`` where the program cannot
    be executed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        grace: float = 20.0,
        settle: float = 15.0,
        temporary: Path | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.log_path = log_path
        self.pid = 0
        self.keeper = 0  # the warden's inner process: what the engine orphans falls to it
        self._longest_stop = grace + settle + 3 * warden.SWEEP_BOUND
        self._lock = threading.RLock()
        self._unread = b""
        self._status: int | None = None
        self._failure = ""
        self._exited = False
        self._ending: Ending | None = None
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.unlink(missing_ok=True)
        with log_path.open("ab") as log:
            # -I -S: neither the user's site nor a .pth file may run in the warden.
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", warden.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._warden.stdin is not None
        assert self._warden.stdout is not None
        self._commands = self._warden.stdin.fileno()
        self._reports = self._warden.stdout.fileno()
        config = {
            "owner": os.getpid(),
            "argv": list(argv),
            "env": dict(env),
            "temporary": str(temporary or ""),
            "grace": grace,
            "settle": settle,
        }
        try:
            self._command(json.dumps(config).encode() + b"\n")
            self._await_start()
        except BaseException:
            self._close()
            raise

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_BOUND
        while not self.pid and not self._failure and self._ending is None and time.monotonic() < deadline:
            self._take_in(1.0)
        if self._failure:
            raise LaunchError(
                f"expected to start {self.argv[0]!r}, found {self._failure}; the whole command was: "
                f"{' '.join(self.argv)}. Check --kvcheck-python, or `command` in the matrix"
            )
        if not self.pid:
            raise LaunchError(
                f"expected the engine's warden to start {self.argv[0]!r} within {START_BOUND:.0f} s, found "
                f"nothing; its last words are in {self.log_path}"
            )

    def alive(self) -> bool:
        """Whether the engine itself (not only something that it started) still runs."""
        self._take_in(0.0)
        return not self._exited

    def exit_status(self) -> int | None:
        """Its exit code (negative: a signal) once it has ended, else None."""
        self._take_in(0.0)
        return self._status

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until the engine has ended; returns whether it has."""
        deadline = time.monotonic() + seconds
        while self.alive() and (left := deadline - time.monotonic()) > 0:
            self._take_in(left)
        return self._exited

    def stop(self, *, hurry: bool = False) -> Ending:
        """TERM, after the grace KILL, sweep; bounded. Returns the same :class:`Ending` when called again.

        ``hurry``: a short grace, and whatever it started is killed at once without counting as left over.
        """
        with self._lock:
            if self._ending is None and hurry and self._warden.stdin is not None:
                self._warden.stdin.close()  # to the warden we are gone
                self._commands = -1
            elif self._ending is None:
                self._command(b"stop\n")
        deadline = time.monotonic() + self._longest_stop
        while self._ending is None and time.monotonic() < deadline:
            self._take_in(1.0)
        with self._lock:
            if self._ending is None:
                self._ending = Ending(self._status, True, (), (f"the engine's warden, pid {self._warden.pid}",))
            self._exited = True
            self._close()
            return self._ending

    def _command(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except OSError:  # the warden has ended already: its report, or the end of its reports, says so
            return

    def _take_in(self, seconds: float) -> None:
        """Take in what the warden reports, waiting at most so long for something."""
        with self._lock:
            if self._ending is not None:
                return
            if not select.select([self._reports], [], [], seconds)[0]:
                return
            data = os.read(self._reports, 65536)
            if not data:  # both wardens are gone without a word
                self._exited = True
                self._ending = Ending(self._status, True)
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._happened(json.loads(line))

    def _happened(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                self.pid, self.keeper = event["pid"], event["keeper"]
            case "failed":
                self._failure = event["error"]
            case "exited":
                self._status, self._exited = event["status"], True
            case "done":
                status = self._status if event["status"] is None else event["status"]
                self._status, self._exited = status, True
                ending = Ending(status, event["forced"], tuple(event["leftovers"]), tuple(event["stuck"]))
                self._ending = ending

    def _close(self) -> None:
        for stream in (self._warden.stdin, self._warden.stdout):
            if stream is not None:
                stream.close()
        try:
            self._warden.wait(10.0)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait(10.0)
