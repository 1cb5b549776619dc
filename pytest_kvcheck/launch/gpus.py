"""GPUs: leased by file locks as ports are, with the memory on them before and after through NVML.

A GPU is leased whole, or in sixteenths to cells that say how much of its memory they take (``gpu_memory``).
NVML is optional. Without it ``--kvcheck-gpus 0,1`` still leases, and no memory is judged.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.ports import registry, try_lock

# A driver's own bookkeeping for a process that is gone; less than any engine takes.
SLACK = 256 << 20
PARTS = 16  # of a GPU; a cell that asks for half of one or more has it alone


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU at one time: bytes used in all, and by each process that NVML shows (host pids in containers)."""

    used: int
    by_pid: dict[int, int]


class Nvml:
    """What NVML tells. Raises ``LookupError`` with the reason where there is none."""

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self.count = int(self._nvml.nvmlDeviceGetCount())
        except ImportError:
            raise LookupError("nvidia-ml-py is not installed: pip install 'pytest-kvcheck[nvidia]'") from None
        except self._nvml.NVMLError as error:
            raise LookupError(f"NVML does not answer: {error}") from None

    def state(self, index: int) -> GpuState:
        """Raises ``LookupError`` where NVML does not answer for this GPU."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            used = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError as error:
            raise LookupError(f"NVML does not answer for GPU {index}: {error}") from None
        return GpuState(used, {process.pid: int(process.usedGpuMemory or 0) for process in processes})

    def uuid(self, index: int) -> str:
        """The name by which CUDA_VISIBLE_DEVICES may call it."""
        return str(self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetHandleByIndex(index)))


def nvml() -> Nvml | None:
    """NVML, or None where there is none."""
    try:
        return Nvml()
    except LookupError:
        return None


@dataclass(slots=True)
class GpuLease:
    """GPUs that are ours until :meth:`close` or the death of this process.

    ``alone`` False: other kvcheck processes may lease other parts of them.
    """

    indices: tuple[int, ...]
    locks: tuple[FileLock, ...]
    reader: Nvml | None
    alone: bool = True
    before: dict[int, GpuState] = field(default_factory=dict)
    ours: dict[int, set[int]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """What makes an engine see these GPUs and no others, numbered as NVML does."""
        visible = ",".join(str(index) for index in self.indices)
        return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def note_processes(self, tree: frozenset[int]) -> None:
        """Remember which of the GPUs' processes are the engine's, ``tree`` being all of its pids.

        Where NVML shows none of the tree (it tells host pids, and we may be in a container), whatever came
        since the lease counts, if nobody else may have come.
        """
        for index, state in self._states().items():
            known = self.before.get(index)
            new = state.by_pid.keys() - (known.by_pid if known else {})
            ours = self.ours.setdefault(index, set())
            ours.update(new & tree or (new if self.alone and not ours & tree else ()))

    def memory_left(self, timeout: float) -> int | None:
        """Bytes that the ended engine still holds, after waiting at most so long for 0; None: not known.

        By process where NVML showed the engine's processes. Elsewhere (some containers) by the sum on the
        GPU, and only where no other process was on it to move that sum.
        """
        deadline = time.monotonic() + timeout
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.25)
        return left

    def _left(self) -> int | None:
        lefts: list[int] = []
        for index, now in self._states().items():
            before, ours = self.before.get(index), self.ours.get(index)
            if ours:
                lefts.append(sum(memory for pid, memory in now.by_pid.items() if pid in ours))
            elif self.alone and before is not None and not before.by_pid and not now.by_pid:
                extra = now.used - before.used
                lefts.append(extra if extra > SLACK else 0)
        return sum(lefts) if lefts else None

    def _states(self) -> dict[int, GpuState]:
        if self.reader is None:
            return {}
        states = {}
        for index in self.indices:
            try:
                states[index] = self.reader.state(index)
            except LookupError:
                continue
        return states

    def close(self) -> None:
        """Give the GPUs back; a second call does nothing."""
        for lock in self.locks:
            lock.release()


def candidates(choice: str, reader: Nvml | None) -> list[int]:
    """The GPUs that ``--kvcheck-gpus`` allows, in order of preference: the emptiest first where it says auto.

    Raises ``LaunchError`` for anything but ``auto`` or a list of numbers, and where there is no such GPU.
    """
    if choice.strip() != "auto":
        parts = [part.strip() for part in choice.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise LaunchError(f"--kvcheck-gpus: expected auto or numbers as in 0,1, found {choice!r}")
        chosen = list(dict.fromkeys(int(part) for part in parts))
        if reader is not None and max(chosen) >= reader.count:
            raise LaunchError(
                f"--kvcheck-gpus: expected numbers below {reader.count} (NVML shows so many), found {choice!r}"
            )
        return chosen
    if reader is None or reader.count == 0:
        why = "NVML shows no GPU here" if reader is not None else _why_no_nvml()
        raise LaunchError(
            f"--kvcheck-device cuda: expected a GPU, found none ({why}); give --kvcheck-gpus 0 to use one "
            "without NVML, or --kvcheck-device cpu"
        )
    visible = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), reader)
    return sorted(visible, key=lambda index: (reader.state(index).used, index))


def lease_gpus(
    count: int, choice: str = "auto", timeout: float = 1800.0, share: float | None = None
) -> GpuLease:
    """Lease ``count`` GPUs, waiting at most ``timeout`` seconds for other workers to give them back.

    ``share`` is the part of each GPU's memory that the engine will take: less than a half leaves the rest to
    others. Raises ``LaunchError`` where there are not so many, or none became free.
    """
    reader = nvml()
    allowed = candidates(choice, reader)
    if len(allowed) < count:
        raise LaunchError(
            f"the cell needs {count} GPUs (tp), found {len(allowed)} that --kvcheck-gpus {choice} allows"
        )
    parts = PARTS if share is None or share >= 0.5 else math.ceil(share * PARTS)
    folder = registry("gpus")
    deadline = time.monotonic() + timeout
    while True:
        # All or nothing: two workers that each hold a half of what both need would wait for ever.
        held: list[tuple[int, list[FileLock]]] = []
        for index in allowed:
            locks = _parts(folder, index, parts)
            if locks:
                held.append((index, locks))
            if len(held) == count:
                return _leased(held, reader, alone=parts == PARTS)
        _release(lock for _, locks in held for lock in locks)
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"expected {count} free GPUs of {allowed} within {timeout:.0f} s, found them leased by other "
                f"kvcheck processes (lock files in {folder}); use no more xdist workers than GPUs, or let "
                "cells share one with a gpu_memory below 0.5"
            )
        time.sleep(0.5)


def _parts(folder: Path, index: int, parts: int) -> list[FileLock]:
    """So many sixteenths of one GPU, or none."""
    locks: list[FileLock] = []
    for part in range(PARTS):
        lock = try_lock(folder / f"{index}.{part}.lock")
        if lock is not None:
            locks.append(lock)
        if len(locks) == parts:
            return locks
    _release(locks)
    return []


def _leased(held: Sequence[tuple[int, list[FileLock]]], reader: Nvml | None, alone: bool) -> GpuLease:
    locks = tuple(lock for _, those in held for lock in those)
    lease = GpuLease(tuple(index for index, _ in held), locks, reader, alone)
    lease.before = lease._states()
    return lease


def _release(locks: Iterable[FileLock]) -> None:
    for lock in locks:
        lock.release()


def _visible(names: str | None, reader: Nvml) -> list[int]:
    """What an outer CUDA_VISIBLE_DEVICES (a scheduler's, say) leaves us, as NVML's numbers."""
    everything = list(range(reader.count))
    if names is None:
        return everything
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    uuids = {index: reader.uuid(index) for index in everything}
    return [
        index
        for index in everything
        if any(
            name == str(index) or (not name.isdecimal() and uuids[index].startswith(name)) for name in wanted
        )
    ]


def _why_no_nvml() -> str:
    try:
        Nvml()
    except LookupError as error:
        return str(error)
    return "NVML shows no GPU here"
