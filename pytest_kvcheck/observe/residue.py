"""What a server leaves behind: processes, descriptors, memory and ports, read with psutil."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process at one time. ``rss`` in bytes; ``fds`` None where they may not be read."""

    pid: int
    created: float
    words: str
    rss: int
    fds: int | None

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.words})"


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """A process and all its descendants at one time."""

    processes: tuple[ProcessFacts, ...] = ()

    @property
    def rss(self) -> int:
        """Resident memory of all of them, in bytes (shared pages count once for each)."""
        return sum(process.rss for process in self.processes)

    @property
    def fds(self) -> int | None:
        """Open descriptors of all of them, None where one of them may not be read."""
        counts = [process.fds for process in self.processes]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    def among(self, other: TreeSnapshot) -> TreeSnapshot:
        """Those of its processes that ``other`` has as well: what one of them gained, no newcomer brought."""
        theirs = {(process.pid, process.created) for process in other.processes}
        return TreeSnapshot(tuple(one for one in self.processes if (one.pid, one.created) in theirs))

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(process.pid for process in self.processes)


def snapshot(pid: int, *, itself: bool = True) -> TreeSnapshot:
    """The tree below ``pid`` and, if ``itself``, with it; empty where there is none. Never raises."""
    try:
        root = psutil.Process(pid)
        members = [root] * itself + root.children(recursive=True)
    except psutil.Error:
        return TreeSnapshot()
    facts = (_facts(process) for process in members)
    return TreeSnapshot(tuple(fact for fact in facts if fact is not None))


def still_alive(processes: Iterable[ProcessFacts]) -> list[ProcessFacts]:
    """Those of the processes that still run; a pid that now belongs to another process does not count."""
    found = []
    for known in processes:
        now = _facts_of(known.pid)
        if now is not None and abs(now.created - known.created) < 0.5:
            found.append(known)
    return found


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens on a port: ``pids`` is empty where another user's process does."""

    port: int
    pids: frozenset[int]

    def __str__(self) -> str:
        facts = [_facts_of(pid) for pid in sorted(self.pids)]
        return ", ".join(str(fact) for fact in facts if fact) or "a process of another user"


def listener(port: int) -> Listener | None:
    """Who listens on a TCP port of this machine, or None where nobody does."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return Listener(port, frozenset()) if _accepts(port) else None
    listening = [
        connection
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    ]
    if not listening:
        return None
    return Listener(port, frozenset(c.pid for c in listening if c.pid is not None))


def topmost(pids: Iterable[int]) -> int | None:
    """Of processes that share a listener (workers of one server), the one that started the others."""
    there = set(pids)
    for pid in sorted(there):
        try:
            parents = {parent.pid for parent in psutil.Process(pid).parents()}
        except psutil.Error:
            continue
        if not parents & there:
            return pid
    return None


def stdout_file(pid: int) -> str | None:
    """The regular file that a process writes its standard output or error to, if that is one."""
    for descriptor in (2, 1):
        try:
            files = psutil.Process(pid).open_files()
        except psutil.Error:
            return None
        for file in files:
            if file.fd == descriptor:
                return str(file.path)
    return None


def _facts_of(pid: int) -> ProcessFacts | None:
    try:
        return _facts(psutil.Process(pid))
    except psutil.Error:
        return None


def _facts(process: psutil.Process) -> ProcessFacts | None:
    try:
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            words = " ".join(process.cmdline()) or process.name()
            rss = process.memory_info().rss
            created = process.create_time()
    except psutil.Error:
        return None
    try:
        fds: int | None = process.num_fds()
    except psutil.Error:
        fds = None
    return ProcessFacts(process.pid, created, " ".join(words.split())[:160], rss, fds)


def _accepts(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
