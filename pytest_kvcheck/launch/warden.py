"""Keeps one engine and lets nothing of it outlive us. Standard library only: it is run as a file, isolated.

Two processes. The *inner* one is the engine's parent: it starts it in a session of its own, waits, stops it,
sweeps and reports. The *outer* one is the inner one's parent and does nothing until the inner one ends, then it
sweeps again. Both are child subreapers, so whatever the engine starts (other groups, other sessions, double
forks) stays in their tree when it is orphaned. What each death does:

* the owner (pytest) dies, also by kill -9: its pidfd and the end of the command pipe tell the inner one;
* the inner one dies: the engine gets SIGKILL from the kernel, its orphans fall to the outer one, which sweeps;
* the outer one dies: the inner one gets SIGTERM from the kernel and stops the engine.

Files go too: the engine's temporary folder, and the shared memory that its processes had mapped and that nobody
maps any more (an engine that kills its own children leaves their segments, which are memory of the machine).

stdin: one line of JSON ``{"owner": pid, "argv": [...], "env": {...}, "temporary": folder, "grace": seconds,
"settle": seconds}``, then "stop".
stdout: one JSON object a line, ``event`` being started, failed, exited or done. stderr is the engine's log.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SWEEP_BOUND = 30.0  # a process in a GPU driver's hands can take this long to die of SIGKILL
ORPHANED_GRACE = 5.0  # nobody waits for a graceful end any more
SHARED = "/dev/shm"
LOOK_EVERY = 2.0  # seconds between looks at what is mapped; children that end in a row must not cost one each

Config = dict[str, Any]


def main() -> int:
    config: Config = json.loads(_read_line())
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outer = os.getpid()
    notes = os.memfd_create("shared")  # what the inner one knows of shared memory outlives it
    inner = os.fork()
    if inner == 0:
        os.setsid()  # a signal to the outer one's group must not take both
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        status = 1
        try:
            Keeper(config, prctl, outer, notes).run()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(inner, signal.SIGTERM))
    os.close(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    _, stuck = sweep(0.0)
    remove(config["temporary"], json.loads(os.pread(notes, os.fstat(notes).st_size, 0) or b"{}"))
    if killed:
        report(event="done", status=None, forced=True, leftovers=[], stuck=stuck, warden=killed)
    return 0


class Keeper:
    """The inner process: one engine from start to sweep."""

    def __init__(self, config: Config, prctl: Any, outer: int, notes: int) -> None:
        self.config = config
        self.prctl = prctl
        self.inner = os.getpid()
        self.engine = 0
        self.status: int | None = None
        self.stop_asked = False
        self.orphaned = False
        self.shared: dict[str, int] = {}
        self._notes = notes
        self._looked = 0.0
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._owner = _pidfd(config["owner"])
        if self._owner is not None:
            self._poll.register(self._owner, select.POLLIN)
        self._wake, wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self._poll.register(self._wake, select.POLLIN)
        # Handlers, not SIG_IGN: a program that is started inherits what is ignored.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._terminated)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != outer:
            self.orphaned = True

    def run(self) -> None:
        """Start the engine, keep it until it ends or is asked to, and leave nothing of it."""
        if not self._start():
            return
        while self.status is None and not self._leaving:
            self._wait(LOOK_EVERY)
            self._look()
        self._look(at_once=True)
        forced = self.status is None and self._terminate()
        report(event="exited", status=self.status)
        settle = 0.0 if forced or self.orphaned else float(self.config["settle"])
        leftovers, stuck = sweep(settle, self._wait_or_hurry)
        remove(self.config["temporary"], self.shared)
        report(event="done", status=self.status, forced=forced, leftovers=leftovers, stuck=stuck, warden=None)

    @property
    def _leaving(self) -> bool:
        return self.stop_asked or self.orphaned

    def _start(self) -> bool:
        try:
            engine = subprocess.Popen(
                self.config["argv"],
                env=self.config["env"],
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                start_new_session=True,
                preexec_fn=self._die_with_me,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            plain = getattr(error, "strerror", None)
            report(event="failed", error=plain.lower() if plain else f"{type(error).__name__}: {error}")
            return False
        self.engine = engine.pid
        engine.returncode = 0  # reaped below, with every orphan, and not by Popen
        report(event="started", pid=self.engine, keeper=self.inner)
        return True

    def _die_with_me(self) -> None:
        self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.inner:  # it died before the line above
            os._exit(1)

    def _terminate(self) -> bool:
        """TERM to the engine's group, KILL after the grace. Returns whether KILL was needed."""
        os.killpg(self.engine, signal.SIGTERM)
        started = time.monotonic()
        while self.status is None:
            grace = float(self.config["grace"])
            if self.orphaned:
                grace = min(grace, ORPHANED_GRACE)
            left = started + grace - time.monotonic()
            if left <= 0:
                break
            self._wait(min(left, 1.0))
        if self.status is not None:
            return False
        os.killpg(self.engine, signal.SIGKILL)
        deadline = time.monotonic() + SWEEP_BOUND
        while self.status is None and time.monotonic() < deadline:
            self._wait(0.5)
        return True

    def _wait(self, seconds: float) -> None:
        """Sleep until something happens, at most so long; then take in all that happened."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._owner:
                self.orphaned = True
                self._poll.unregister(descriptor)
                self._owner = None
            elif descriptor == 0:
                if os.read(0, 65536):
                    self.stop_asked = True
                else:
                    self.orphaned = True
                    self._poll.unregister(0)
            else:
                os.read(self._wake, 65536)
        for pid, status in reap():
            if pid == self.engine:
                self.status = status

    def _look(self, at_once: bool = False) -> None:
        if at_once or time.monotonic() - self._looked >= LOOK_EVERY:
            self.shared |= shared_files(descendants())
            os.pwrite(self._notes, json.dumps(self.shared).encode(), 0)  # it only grows
            self._looked = time.monotonic()

    def _wait_or_hurry(self, seconds: float) -> bool:
        self._wait(seconds)
        return self.orphaned

    def _terminated(self, number: int, frame: object) -> None:
        # From the kernel (the outer one died) or from a person: nobody speaks to us any more either way.
        self.orphaned = True


def sweep(settle: float, wait: Callable[[float], bool] = bool) -> tuple[list[str], list[str]]:
    """Kill every descendant that outlives ``settle`` seconds; returns those, and those that SIGKILL left.

    ``wait(seconds)`` sleeps and returns whether to settle no longer; then nothing counts as left over.
    """
    deadline = time.monotonic() + settle
    hurried = settle <= 0
    while not hurried and descendants() and time.monotonic() < deadline:
        hurried = wait(0.05)
    leftovers = [] if hurried else [describe(pid) for pid in descendants()]
    deadline = time.monotonic() + SWEEP_BOUND
    pids = descendants()
    while pids and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone since, or it has become another user's
                continue
        time.sleep(0.02)
        reap()
        pids = descendants()
    return leftovers, [describe(pid) for pid in pids]


def descendants() -> list[int]:
    """Every living process below this one; subreaping makes that all that the engine ever started."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(name))
        # A zombie whose other threads still run is alive.
        if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
            dead.add(int(name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [pid for pid in found if pid not in dead]


def shared_files(pids: list[int]) -> dict[str, int]:
    """The files in shared memory that these processes have mapped: path -> inode.

    By inode, since a semaphore is made under another name than the one that it has.
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
                inodes.update(int(line.split(None, 5)[4]) for line in file if f" {SHARED}/" in line)
        except OSError:  # gone since, or another user's
            continue
    if not inodes:
        return {}
    with os.scandir(SHARED) as entries:
        return {entry.path: entry.inode() for entry in entries if entry.inode() in inodes}


def remove(temporary: str, shared: dict[str, int]) -> None:
    """Remove the engine's temporary folder, and of its shared memory what no living process has mapped."""
    shutil.rmtree(temporary, ignore_errors=True)
    if not shared:
        return
    in_use = shared_files([int(name) for name in os.listdir("/proc") if name.isdigit()])
    for path, inode in shared.items():
        try:
            if path not in in_use and os.stat(path).st_ino == inode:
                os.unlink(path)
        except OSError:  # gone since, as it should be
            continue


def describe(pid: int) -> str:
    """``pid 12 (python -m ...)``, as far as it can still be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        if not words:
            with open(f"/proc/{pid}/comm", errors="replace") as text:
                words = text.read().strip()
    except OSError:
        words = "gone since"
    return f"pid {pid} ({' '.join(words.split())[:160]})"


def reap() -> list[tuple[int, int]]:
    """Collect every ended child: (pid, exit code, negative for a signal)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def report(**event: Any) -> None:
    """One line to the owner, if there still is one."""
    try:
        os.write(1, json.dumps(event).encode() + b"\n")
    except OSError:
        return


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or the owner is gone: the end of stdin tells
        return None


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 65536 if not line else 1)
        if not byte:
            raise SystemExit(0)  # the owner died before it said what to start
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
