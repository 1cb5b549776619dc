"""What an oracle gets and gives. An oracle is one function or class in one file, and one line in the table.

Oracles know engines only by :class:`~pytest_kvcheck.oracles.base.Promises`; they never ask for a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.observe.blocks import StoredBlock
from pytest_kvcheck.observe.logs import LogEvent
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.trace import GaugeSample, OpRecord, Phase


@dataclass(frozen=True, slots=True)
class Promises:
    """What the engine promises for this cell, so that no oracle needs to know its name.

    ``expected_cached(previous, sent)`` is the inclusive range of legal ``cached_tokens`` of a turn after a
    finished one, without retraction or eviction. ``streaming_sessions``: the server keeps the history itself.
    ``lacks``: gauge or oracle -> why this version does not have it.
    """

    streaming_sessions: bool
    expected_cached: Callable[[int, int], tuple[int, int]]
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The process as the launcher saw it; ``stopped`` is set only in the case after which it was stopped.

    ``alive``: whether it ran, or, once stopped, whether it still ran when we began to stop it; ``exit_code``
    is then that of the stop (engines kill themselves on TERM, so -9 is no fault). ``leftover_processes``
    outlived the engine and had to be killed; ``stop_forced``: the engine did not heed TERM within its grace.
    ``gpu_memory_left``, ``rss_*`` in bytes; descriptors and memory are sums over those processes of the tree
    that were there before and after.
    """

    alive: bool = True
    exit_code: int | None = None
    attached: bool = False
    stopped: bool = False
    leftover_processes: tuple[str, ...] = ()
    port_still_open: bool = False
    gpu_memory_left: int | None = None
    fds_before: int | None = None
    fds_after: int | None = None
    rss_before: int | None = None
    rss_after: int | None = None
    stop_forced: bool = False


@dataclass(slots=True)
class CaseFacts:
    """All that was seen of one case.

    ``records`` holds every phase in the order in which operations ended. ``baseline`` is the account before
    the first operation, ``idle`` the account after everything was closed and *before any flush*;
    ``idle_reached`` whether the server came to rest within its bound (``idle_wait`` seconds were spent).
    ``scored`` are scorings in float32 by another implementation than the engine, ``rounded`` some of the same
    in the type that the engine computes in; both are empty without ``--kvcheck-scorer``.
    ``kept``: where memory was missing, the blocks that outlived a pool full of fresh tokens; None: not known.
    """

    cell: Cell
    plan: Plan
    promises: Promises
    records: list[OpRecord]
    samples: list[GaugeSample] = field(default_factory=list)
    baseline: GaugeSample | None = None
    idle: GaugeSample | None = None
    idle_reached: bool = True
    idle_wait: float = 0.0
    kept: list[StoredBlock] | None = None
    log: list[LogEvent] = field(default_factory=list)
    log_tail: list[str] = field(default_factory=list)
    log_path: Path | None = None
    server: ServerFacts = field(default_factory=ServerFacts)
    engine: str = ""
    engine_version: str = ""
    client_lag: float = 0.0
    scored: list[OpRecord] = field(default_factory=list)
    rounded: list[OpRecord] = field(default_factory=list)
    exercised: dict[str, int] = field(default_factory=dict)

    def of_phase(self, *phases: Phase) -> Iterator[OpRecord]:
        """The records of these phases, in the order in which they ended."""
        return (record for record in self.records if record.phase in phases)


class Oracle(Protocol):
    """Judges a case. Must not raise for anything a server did."""

    def __call__(self, facts: CaseFacts) -> list[Finding]: ...
