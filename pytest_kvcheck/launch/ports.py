"""Ports without a race between looking and binding: a block of ports is leased by a file lock.

An engine derives more ports from the one that it is given, so a lease is a block, and it lies below the
kernel's ephemeral range, from which no outgoing connection takes a port. The operating system drops the lock
when its holder dies, however it dies. A foreign process can still bind a leased port: the launcher checks
after the start that the listener is its own.
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pytest_kvcheck.launch.errors import LaunchError

PORTS_PER_SERVER = 16
FIRST, LAST = 20000, 32000


def registry(kind: str) -> Path:
    """The folder of lock files of one kind of lease, one a user. Raises ``LaunchError`` if it is not ours."""
    folder = Path(tempfile.gettempdir()) / f"kvcheck-{os.getuid()}" / kind
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise LaunchError(
            f"expected to keep leases in {folder}, found: {error}; set TMPDIR to a folder that you can write"
        ) from error
    if owner != os.getuid():
        raise LaunchError(f"expected {folder} to be yours, found that user id {owner} owns it; set TMPDIR")
    return folder


def try_lock(path: Path) -> FileLock | None:
    """The lock if it was free, else None. It may be released by another thread than this."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


@dataclass(slots=True)
class PortLease:
    """``size`` ports from ``base`` on, ours until :meth:`close` or the death of this process."""

    base: int
    size: int
    lock: FileLock

    def close(self) -> None:
        """Give the block back; a second call does nothing."""
        self.lock.release()


def lease_ports(size: int = PORTS_PER_SERVER, first: int = FIRST, last: int = LAST) -> PortLease:
    """Lease the first free block of ``size`` ports in ``[first, last)``.

    Raises ``LaunchError`` when every block is leased or has a port in use.
    """
    folder = registry("ports")
    last = max(first + size, min(last, _ephemeral_start()))
    blocks = list(range(first, last - size + 1, size))
    # Start at a place of our own: many workers that start at once do not all queue at the first block.
    turn = os.getpid() % len(blocks)
    for base in blocks[turn:] + blocks[:turn]:
        lock = try_lock(folder / f"{base}.lock")
        if lock is None:
            continue
        if all(_bindable(port) for port in range(base, base + size)):
            return PortLease(base, size, lock)
        lock.release()
    raise LaunchError(
        f"expected {size} free ports in a row in {first}..{last - 1}, found that every block is leased by "
        f"another kvcheck process or has a port in use; leases are lock files in {folder}, `ss -ltnp` shows "
        "who listens"
    )


def _bindable(port: int) -> bool:
    # All addresses: a listener on any of them would collide with an engine that binds them all.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a connection in TIME_WAIT does not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
