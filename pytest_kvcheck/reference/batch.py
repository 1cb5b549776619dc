"""Requests, and how they become one forward pass and its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .model import Inputs, Segment
from .pools import Holding, Ints
from .sessions import Session

State = Literal["waiting", "prefill", "running", "done"]
# (log-prob, token id) of the likeliest tokens at one position, the likeliest first
Tops = list[tuple[float, int]]


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; otherwise ``seed`` and the position decide, so that batching changes
    nothing.
    """

    max_new: int
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


@dataclass(eq=False)
class Request:
    """One request. ``prompt`` is all it attends to, a session's history included.

    ``input_start``: first prompt position whose log-prob is wanted (-1: none). ``epoch`` counts retractions
    and the end, so that a result that was under way then is known to be stale.
    """

    rid: str
    prompt: list[int]
    sampling: Sampling
    logprobs: bool = False
    input_start: int = -1
    tops: int = 0
    session: Session | None = None
    state: State = "waiting"
    epoch: int = 0
    holding: Holding | None = None
    inherited: int = 0
    filled: int = 0
    cached: int | None = None
    retractions: int = 0
    output: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_tops: list[Tops] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_tops: list[Tops] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    refused: str | None = None  # why the engine must not run it

    def __post_init__(self) -> None:
        self.ids: Ints = np.array(self.prompt, dtype=np.int64)

    def refill(self) -> None:
        """Take up what was generated so far: after a retraction it must be computed again."""
        self.ids = np.array(self.prompt + self.output, dtype=np.int64)

    def take_inputs(self, entry: Entry, logprobs: list[float], tops: list[Tops] | None) -> None:
        """Log-probs of the prompt's tokens behind those of a chunk, unless they are known already."""
        rows = entry.rows[:-1] if entry.final else entry.rows
        first = entry.end - len(rows) + (not entry.final)
        if self.input_start < 0 or first != self.input_start + 1 + len(self.input_logprobs):
            return
        for row in rows[: max(0, len(self.prompt) - first)]:
            self.input_logprobs.append(logprobs[row])
            if tops is not None:
                self.input_tops.append(tops[row][: self.tops])


@dataclass
class Entry:
    """One request's part of a batch: tokens ``[start, end)`` of its history.

    ``final``: a token is sampled behind it. ``rows`` are its rows among the wanted logits, of which the last
    is the sampled token's if ``final``.
    """

    request: Request
    epoch: int
    start: int
    end: int
    final: bool
    decode: bool
    rows: range = range(0)
    sampled: int = -1


@dataclass
class Result:
    """A batch under way: what the device gave, not yet read. ``logprobs`` and ``tops`` have one row a
    wanted token.
    """

    entries: list[Entry]
    next_ids: Tensor
    logprobs: Tensor | None
    tops: tuple[Tensor, Tensor] | None

    def deliver(self) -> Iterator[Entry]:
        """Read the device and give each request what is its own; yields the entries that are not stale."""
        next_ids = self.next_ids.tolist()
        logprobs = self.logprobs.tolist() if self.logprobs is not None else None
        tops: list[Tops] | None = None
        if self.tops is not None:
            pairs = zip(self.tops[0].tolist(), self.tops[1].tolist(), strict=True)
            tops = [list(zip(values, ids, strict=True)) for values, ids in pairs]
        for entry in self.entries:
            request = entry.request
            if entry.epoch != request.epoch:
                continue  # it finished, was aborted or retracted while this batch ran
            if logprobs is not None and not entry.decode:
                request.take_inputs(entry, logprobs, tops)
            if entry.final and request.sampling.max_new > 0:
                request.output.append(next_ids[entry.sampled])
                if logprobs is not None and request.logprobs:
                    request.output_logprobs.append(logprobs[entry.rows[-1]])
                    if tops is not None:
                        request.output_tops.append(tops[entry.rows[-1]][: request.tops])
            yield entry


class BatchBuilder:
    """Puts segments together into one :class:`Inputs`. Indices are computed on the host, in numpy."""

    def __init__(self, table: Ints, device: torch.device, dtype: torch.dtype) -> None:
        self.table, self.device, self.dtype = table, device, dtype
        self.ids: list[Tensor] = []
        self.positions: list[Ints] = []
        self.write: list[Ints] = []
        self.segments: list[Segment] = []
        self.tokens = 0

    def add(self, ids: Tensor, rows: Ints, starts: Ints, queries: int) -> None:
        """Requests with ``queries`` new tokens each, from position ``starts`` on."""
        positions = starts[:, None] + np.arange(queries)
        width = int(starts.max()) + queries
        slots = self._tensor(self.table[rows, :width])
        seen = np.arange(width) <= positions[:, :, None]
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
        masked = torch.from_numpy(mask).to(device=self.device, dtype=self.dtype)
        self.segments.append(Segment(self.tokens, len(rows), queries, (slots, slots), (masked, masked)))
        self.ids.append(ids)
        self.positions.append(positions.ravel())
        self.write.append(self.table[rows[:, None], positions].ravel())
        self.tokens += len(rows) * queries

    def build(self, wanted: Sequence[int]) -> Inputs:
        write = self._tensor(np.concatenate(self.write))
        return Inputs(
            ids=torch.cat(self.ids) if len(self.ids) > 1 else self.ids[0],
            positions=self._tensor(np.concatenate(self.positions)),
            write=(write, write),
            segments=self.segments,
            wanted=self._tensor(np.array(wanted, dtype=np.int64)),
        )

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The next token of each row. Deterministic: a row's seed and position give its random number."""
    chosen = logits.argmax(-1)
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + position)
            weights = (logits[row].float() / sampling.temperature).softmax(-1).cpu()
            chosen[row] = torch.multinomial(weights, 1, generator=generator)[0]
    return chosen
