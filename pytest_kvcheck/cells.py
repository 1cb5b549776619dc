"""What a matrix says, as plain data: features, cells and cases.

No I/O and no third-party import: the plugin holds these objects while it collects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EngineName = Literal["reference", "sglang", "vllm"]
ENGINE_NAMES: tuple[EngineName, ...] = ("reference", "sglang", "vllm")
DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a matrix file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Retract:
    """Forced retraction: every ``interval`` decode steps the scheduler retracts running requests."""

    interval: int = 3


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding. ``draft_tokens`` is the size of the verified tree, the root included."""

    algorithm: str = "EAGLE"
    version: Literal["v1", "v2"] = "v2"
    overlap: bool = True
    steps: int = 3
    draft_tokens: int = 4
    topk: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """A model: an absolute folder (weights, or a recipe to make them from) or a hub id."""

    path: str
    draft: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """Engine-neutral features of one server configuration. Sizes are in tokens."""

    streaming_session: bool = True
    page_size: int = 1
    chunked_prefill: int | None = 512
    mixed_chunk: bool = False
    context_length: int = 4096
    pool_tokens: int | None = 65536
    max_running: int = 16
    retract: Retract | None = None
    speculative: Speculative | None = None
    prefix_cache: bool = True
    tp: int = 1
    gpu_memory: float | None = None
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Known:
    """A finding that is expected until a date because the engine is at fault (see ``docs/findings``).

    ``sometimes``: it needs a race, so a run in which it does not appear is no surprise. ``before``: the first
    release that is known to be without it, "" where there is none yet. ``text``: words of its headline or
    evidence, "" where the kind says enough.
    """

    kind: str
    page: str
    until: str
    sometimes: bool = False
    before: str = ""
    text: str = ""

    def concerns(self, version: str) -> bool:
        """Whether it is expected of this release; of one without a number only if no ``before`` is given."""
        mine = _release(version)
        return not self.before or (mine is not None and mine < (_release(self.before) or ()))


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """A workload's name with the parameters that differ from its defaults, and what is known of it here."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One server configuration of a matrix, with defaults and engine overlays already applied."""

    name: str
    family: str
    engine: EngineName
    model: Model
    features: Features
    at: Position
    device: DeviceName = "cpu"
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    workloads: tuple[WorkloadRef, ...] = ()
    exercise: Literal["required", "optional"] = "required"
    known: tuple[Known, ...] = ()
    plant: tuple[str, ...] = ()
    silent: bool = False  # --kvcheck-silent took the strict check from what the matrix says

    @property
    def launch_key(self) -> str:
        """Equal for two cells exactly when they may share one running server."""
        what = {
            "engine": self.engine,
            "device": self.device,
            "model": dataclasses.asdict(self.model),
            "features": dataclasses.asdict(self.features),
            "args": dict(self.args),
            "env": dict(self.env),
            "command": self.command,
            "plant": self.plant,
        }
        text = json.dumps(what, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Case:
    """Cell x workload = one pytest item. ``repeat`` counts from 0."""

    cell: Cell
    workload: WorkloadRef
    repeat: int = 0

    @property
    def known(self) -> tuple[Known, ...]:
        """The findings that are expected of this case: those of its cell and those of its workload."""
        return self.cell.known + self.workload.known

    @property
    def name(self) -> str:
        """The part of the pytest id behind the matrix file: ``cell::workload`` or ``cell::workload#2``."""
        suffix = f"#{self.repeat + 1}" if self.repeat else ""
        return f"{self.cell.name}::{self.workload.name}{suffix}"


def _release(version: str) -> tuple[int, ...] | None:
    """``0.5.12.post1`` -> (0, 5, 12); None where the text is no version."""
    hit = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, hit.groups())) if hit else None
