"""What happened: replies, operation records and gauge samples, written as JSON Lines while it happens.

Times are seconds of one monotonic clock that starts with the trace; ``seq`` numbers come from one logical
clock shared by all operations, so that the order of two events never rests on a float.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from pytest_kvcheck.operations import Operation

SCHEMA = 1
# The note at the end of a case's trace that holds its findings.
VERDICT = "verdict"

# Which part of a case an operation belongs to. Only "workload" is replayed and shrunk.
# "scorer": not asked of the server at all, but of another implementation.
Phase = Literal["workload", "drain", "probe", "control", "replay", "scorer"]
# How a request ended, engine-neutral. "rejected": the server refused it without running it.
Finish = Literal["length", "stop", "abort", "rejected", "disconnected", "timeout", "error"]
# The finishes of a request that ran to its own end.
FINISHED: tuple[Finish, ...] = ("length", "stop")


class Clock:
    """The two clocks of a trace: seconds since it was made, and a counter that orders events exactly."""

    def __init__(self) -> None:
        self._origin = time.monotonic()
        self._seq = itertools.count(1)

    def now(self) -> float:
        """Seconds since the clock was made; never goes back."""
        return time.monotonic() - self._origin

    def tick(self) -> int:
        """The next number of the logical clock, the first being 1; safe from any thread."""
        return next(self._seq)


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the server answered to one operation, in engine-neutral words.

    ``output_logprobs[i]`` belongs to ``output_ids[i]``. ``input_logprobs[i]`` is the log-prob of the prompt's
    token at position ``input_start + i`` given what stands before it; the very first is None.
    ``top_logprobs[i]`` is the greatest log-prob at the same position as ``input_logprobs[i]`` (score only).
    A count is None where the engine did not send it. ``faults`` are violations of the protocol as such
    (truncated stream, NaN, lengths that disagree), each one sentence; the oracles turn them into findings.
    ``samples`` are the other answers to a request that asked for several.
    """

    http_status: int | None = None
    finish: Finish = "error"
    message: str = ""
    output_ids: list[int] = []
    output_logprobs: list[float | None] | None = None
    input_logprobs: list[float | None] | None = None
    input_ids: list[int] | None = None
    input_start: int = 0
    top_logprobs: list[float | None] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int | None = None
    spec_verify_steps: int | None = None
    events: int = 0
    faults: list[str] = []
    session_id: str | None = None
    samples: list[Reply] = []


class OpRecord(msgspec.Struct, kw_only=True, omit_defaults=True, tag="op", tag_field="record"):
    """One operation as it went.

    ``history`` is how many tokens of the session were visible to the client when the turn was sent (by the
    client's own ledger, so it is what the server *should* hold). ``shown_at_action`` is how many tokens the
    target had shown when an abort or disconnect was sent, or None if the target had already ended.
    ``client_lag`` is the greatest delay of the client's own event loop while the operation ran, in seconds.
    """

    op: Operation
    phase: Phase = "workload"
    rid: str | None = None
    history: int = 0
    started: float = 0.0
    first_token: float | None = None
    ended: float = 0.0
    started_seq: int = 0
    ended_seq: int = 0
    shown_at_action: int | None = None
    client_lag: float = 0.0
    reply: Reply = msgspec.field(default_factory=Reply)


class PoolGauge(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One pool's account in tokens. None: this source does not tell. See DESIGN "Strict check"."""

    pool: str = "full"
    total: int | None = None
    used: int | None = None
    available: int | None = None
    evictable: int | None = None
    protected: int | None = None
    session_held: int | None = None
    uncached: int | None = None


class GaugeSample(msgspec.Struct, kw_only=True, omit_defaults=True, tag="gauges", tag_field="record"):
    """The server's own account at one time. ``missing`` names gauges that should be there and are not."""

    t: float
    source: str
    pools: list[PoolGauge] = []
    running: int | None = None
    waiting: int | None = None
    sessions: int | None = None
    retracted_total: int | None = None
    aborted_total: int | None = None
    missing: list[str] = []
    error: str = ""

    def pool(self, name: str) -> PoolGauge | None:
        """The gauge of one pool, or None where this sample has none."""
        return next((gauge for gauge in self.pools if gauge.pool == name), None)


class TraceHeader(msgspec.Struct, kw_only=True, omit_defaults=True, tag="header", tag_field="record"):
    """The first line of a trace: all that is needed to run it again."""

    schema: int = SCHEMA
    family: str = ""
    cell: str = ""
    workload: str = ""
    seed: int = 0
    engine: str = ""
    engine_version: str = ""
    started_at: str = ""
    argv: list[str] = []
    env: dict[str, str] = {}
    model: str = ""
    params: dict[str, int | float | str | bool] = {}
    must_exercise: list[str] = []
    # The whole cell as plain data (cells.Cell).
    cell_spec: dict[str, Any] = {}


class Note(msgspec.Struct, kw_only=True, omit_defaults=True, tag="note", tag_field="record"):
    """Something the harness did or saw between operations, with whatever data explains it."""

    t: float
    what: str
    data: dict[str, Any] = {}


Line = TraceHeader | OpRecord | GaugeSample | Note


class TraceWriter:
    """Appends lines to a trace as they happen, so that a crash of the client keeps what came before.

    Raises ``OSError`` where the file cannot be created.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._file = path.open("wb", buffering=0)
        self.write(header)

    def write(self, line: Line) -> None:
        """Append one line; it has left this process when the call returns."""
        if not self._file.closed:
            os.write(self._file.fileno(), self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def read_trace(path: Path) -> Iterator[Line]:
    """The lines of a trace in file order. A last line that a crash cut short is dropped.

    Raises ``OSError`` where the file cannot be read, ``ValueError`` (with path and line number) where a line
    other than the last is no trace line.
    """
    decoder = msgspec.json.Decoder(Line)
    lines = path.read_bytes().splitlines()
    for number, raw in enumerate(lines, start=1):
        try:
            yield decoder.decode(raw)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}:{number}: expected a kvcheck trace line, found: {error}") from error
