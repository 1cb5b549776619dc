"""What the product needs to know of an engine: how to start it, speak to it and read its account.

One subclass of :class:`Engine` a product, one instance a launch. Nothing here imports an engine: it is always
another process. All knowledge of versions (flags, metrics, log lines) lives in the subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pytest_kvcheck.cells import Cell, DeviceName
from pytest_kvcheck.client.calls import Call as Call
from pytest_kvcheck.client.calls import ReplyParser as ReplyParser
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.observe.blocks import StoredBlock
from pytest_kvcheck.observe.logs import LogEvent, LogRule
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import GaugeSample


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """How to start a server. ``env`` holds additions to the inherited environment; None removes a name.

    ``notes`` say, one sentence each, where the server will differ from the cell's words.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    ready_deadline: float = 300.0
    stop_grace: float = 20.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchInputs:
    """What the launcher has decided: ``port`` is held for the server, model folders exist, weights included."""

    cell: Cell
    port: int
    python: str
    device: DeviceName
    model: str
    draft: str | None
    scratch: Path


@dataclass(frozen=True, slots=True)
class Rules:
    """What an engine promises, so that oracles can judge it without knowing its name.

    ``sessions``: "streaming" (the server keeps the history) or "resent" (the client sends it whole again and
    the prefix cache may hit). ``aborted_turn_keeps_kv``: whether cached tokens may be fewer after an abort.
    ``stale_when_idle``: gauges move only with a batch, so a request of ``refresh_tokens`` output tokens must
    end before a reading (SGLang publishes its session gauges only with a decode step, not with a prefill).
    ``last_token_optional``: the last sampled token of a turn may be missing from the cached length.
    ``has``: names of oracles and gauges that this version has (golden list); ``lacks``: name -> reason.
    """

    sessions: Literal["streaming", "resent"] = "streaming"
    stale_when_idle: bool = True
    refresh_tokens: int = 2
    has: frozenset[str] = frozenset()
    lacks: Mapping[str, str] = field(default_factory=dict)


class Engine(ABC):
    """An engine adapter. ``version`` is "" until :meth:`identify` was called with the server's own word."""

    name: ClassVar[str]
    # What only switches the engine's own checks, as misfits() calls it: a server that is not ours may lack it.
    own_checks: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.version = ""

    # --- start -----------------------------------------------------------------------------------
    @abstractmethod
    def unsupported(self, cell: Cell, device: DeviceName, version: str) -> str | None:
        """Why this engine and version (may be "": unknown) cannot run the cell, or None."""

    @abstractmethod
    def installed_version(self, python: str) -> str:
        """The version in that interpreter's environment, found without importing the engine.

        Raises ``LookupError`` with one paragraph (what was looked for, where, how to install it).
        """

    def listen(self, cell: Cell) -> None:
        """Begin to take what the cell's server will publish; called before :meth:`launch_spec`."""
        return

    def close(self) -> None:
        """End what :meth:`listen` began; a second call does nothing."""
        return

    @abstractmethod
    def launch_spec(self, inputs: LaunchInputs) -> LaunchSpec: ...

    @abstractmethod
    def ready(self, control: Control) -> bool:
        """Whether the server takes requests now; False on refusal, never raises for it."""

    @abstractmethod
    def identify(self, control: Control) -> dict[str, Any]:
        """Ask the server what it is, set ``version`` and return its own account of its configuration."""

    @abstractmethod
    def misfits(self, cell: Cell, info: Mapping[str, Any]) -> list[str]:
        """Flags and environment that did not arrive, one sentence each (expected, found). Empty: all did."""

    def adopt(self, cell: Cell, info: Mapping[str, Any]) -> Cell:
        """The cell with the sizes (context, pool, rows, chunk) that a server which is not ours really has."""
        return cell

    @abstractmethod
    def rules(self, cell: Cell) -> Rules: ...

    def precision(self, info: Mapping[str, Any]) -> str:
        """The type that a server with this configuration computes in ("float16"); "" is the weights' own.

        Raises ``LookupError`` (one sentence) where weights or KV are quantised: then no other implementation
        can be expected to give the same log-probs.
        """
        return ""

    def model_of(self, info: Mapping[str, Any]) -> str:
        """The folder or hub id of the model that a server with this configuration serves; "" if not told."""
        return str(info.get("model_path") or "")

    # --- requests --------------------------------------------------------------------------------
    @abstractmethod
    def open_call(self, op: Operation, session_id: str) -> Call | None:
        """How to open a session with an id of our choice; None where sessions are the client's only."""

    @abstractmethod
    def close_call(self, session_id: str) -> Call | None: ...

    @abstractmethod
    def request_call(self, op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call:
        """A turn, generate or score operation. ``history`` is the session's visible history before it."""

    @abstractmethod
    def reply_parser(self, op: Operation, history: int) -> ReplyParser:
        """A parser for one request; ``history`` is the length of the visible history before it."""

    @abstractmethod
    def abort_call(self, rid: str | None) -> Call | None:
        """Abort one request (None: all). None where the engine has no such call: the client disconnects."""

    @abstractmethod
    def flush_call(self) -> Call: ...

    @abstractmethod
    def expected_cached(self, previous: int, sent: int, cell: Cell) -> tuple[int, int]:
        """Inclusive range of legal ``cached_tokens`` of a turn whose session showed ``previous`` tokens after
        its last *finished* turn, ``sent`` tokens in all being the new prompt. Without retraction or eviction.
        """

    # --- observation -----------------------------------------------------------------------------
    def provoke_call(self, cell: Cell) -> Call | None:
        """What to send again and again while a workload runs, to have the engine do what the cell says.

        None where its flags are enough.
        """
        return None

    def stored_blocks(self) -> Mapping[Hashable, StoredBlock] | None:
        """The blocks of the prefix cache now, by its own events; None where it tells none, or not all."""
        return None

    @abstractmethod
    def log_rules(self) -> Sequence[LogRule]: ...

    @abstractmethod
    def sample(self, control: Control, t: float) -> GaugeSample:
        """A cheap reading for the timeline. Never raises: what failed stands in ``error`` or ``missing``."""

    @abstractmethod
    def account(self, control: Control, t: float, recent: Sequence[LogEvent]) -> GaugeSample:
        """The fullest account there is, at idle and before any flush; ``recent`` are log events since the
        last operation ended. Gauges that this version should have and that are absent stand in ``missing``.
        """
