"""Requests, and how they become one forward pass and its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .model import Inputs, Segment
from .pools import Holding, Ints, Memory
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

    ``input_start``: first prompt position whose log-prob is wanted (-1: none). ``epoch`` counts retractions and
    the end, so that a result that was under way then is known to be stale. ``inherited``: tokens whose KV it
    found; ``filled``: tokens of ``ids`` that were given to the model. ``accepted`` counts the verify rounds of
    speculation by how many draft tokens they accepted.
    """

    rid: str
    prompt: list[int]
    sampling: Sampling
    logprobs: bool = False
    input_start: int = -1
    tops: int = 0
    session: Session | None = None
    refused: str | None = None  # why the engine must not run it
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
    accepted: dict[int, int] = field(default_factory=dict)
    finish: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.ids: Ints = np.array(self.prompt, dtype=np.int64)

    @property
    def known(self) -> int:
        """Tokens whose KV the results read so far account for: all but the last one sampled."""
        return len(self.prompt) + max(0, len(self.output) - 1)

    def refill(self) -> None:
        """Take up what was generated so far: after a retraction it must be computed again."""
        self.ids = np.array(self.prompt + self.output, dtype=np.int64)

    def ended(self) -> dict[str, Any] | None:
        """SGLang's finish reason once the output is complete."""
        if self.output and self.output[-1] in self.sampling.stop:
            return {"type": "stop", "matched": self.output[-1]}
        if len(self.output) >= self.sampling.max_new:
            return {"type": "length", "length": len(self.output)}
        return None

    def take_output(self, tokens: list[int], logprobs: list[float], tops: list[Tops]) -> None:
        """Append sampled tokens up to the one that completes the output."""
        if self.sampling.max_new == 0:
            return
        for index, token in enumerate(tokens):
            self.output.append(token)
            if self.logprobs:
                self.output_logprobs.append(logprobs[index])
                if tops:
                    self.output_tops.append(tops[index][: self.tops])
            if self.ended():
                return

    def take_inputs(self, entry: Entry, logprobs: list[float], tops: list[Tops]) -> None:
        """Log-probs of the prompt's tokens behind those of a chunk, unless they are known already."""
        rows = entry.rows[:-1] if entry.final else entry.rows
        first = entry.end - len(rows) + (not entry.final)
        if self.input_start < 0 or first != self.input_start + 1 + len(self.input_logprobs):
            return
        for row in rows[: max(0, len(self.prompt) - first)]:
            self.input_logprobs.append(logprobs[row])
            if tops:
                self.input_tops.append(tops[row][: self.tops])


@dataclass
class Entry:
    """One request's part of a batch: tokens ``[start, end)`` of its history.

    ``final``: a token is sampled behind it. ``rows`` are its rows among the wanted logits; the last ``width``
    of them (1, or one for each verified token) are sampled. ``sampled`` is its row among the sampled tokens
    and ``count`` how many of those became output.
    """

    request: Request
    holding: Holding
    epoch: int
    start: int
    end: int
    final: bool
    decode: bool
    rows: range = range(0)
    sampled: int = -1
    count: int = 1


@dataclass
class Result:
    """A batch under way: what the device gave, not yet read.

    ``tokens`` is [sampled, width]; ``counts`` says how many of each row are output (None: one of each).
    ``logprobs`` and ``tops`` have one row a wanted token.
    """

    entries: list[Entry]
    tokens: Tensor
    counts: Tensor | None
    logprobs: Tensor | None
    tops: tuple[Tensor, Tensor] | None

    def deliver(self, late: bool = False) -> Iterator[Entry]:
        """Read the device and give each request what is its own; yields the entries that are not stale.

        ``late`` True (a planted fault): also to requests that were retracted meanwhile.
        """
        tokens = self.tokens.tolist()
        counts = self.counts.tolist() if self.counts is not None else [1] * len(tokens)
        logprobs = self.logprobs.tolist() if self.logprobs is not None else []
        tops: list[Tops] = []
        if self.tops is not None:
            pairs = zip(self.tops[0].tolist(), self.tops[1].tolist(), strict=True)
            tops = [list(zip(values, ids, strict=True)) for values, ids in pairs]
        for entry in self.entries:
            request = entry.request
            if entry.epoch != request.epoch and not (late and request.state == "waiting"):
                continue  # it finished, was aborted or retracted while this batch ran
            if logprobs and not entry.decode:
                request.take_inputs(entry, logprobs, tops)
            if entry.final:
                entry.count = counts[entry.sampled]
                rows = entry.rows if entry.decode else entry.rows[-1:]
                part = slice(rows.start, rows.stop)
                request.take_output(tokens[entry.sampled][: entry.count], logprobs[part], tops[part])
            yield entry


@dataclass(frozen=True)
class Tree:
    """New tokens that do not all follow one another.

    They take the slots from ``offset`` on behind a request's history. Token i stands ``depth[i]`` positions
    behind it, and ``seen[i, j]`` says whether it sees the j-th slot there; all see the history.
    """

    offset: int
    depth: Ints
    seen: np.ndarray[Any, np.dtype[np.bool_]]

    @staticmethod
    def line(length: int) -> Tree:
        """Tokens that do follow one another."""
        return Tree(0, np.arange(length), np.tri(length, dtype=np.bool_))

    def depth_of(self, relative: Ints) -> Ints:
        """The depth of keys by their distance from the history's end."""
        at = np.clip(relative - self.offset, 0, len(self.depth) - 1)
        return np.where(relative < 0, relative, self.depth[at])

    def sees(self, relative: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which keys each token sees, [count, tokens, keys]; ``relative`` [count, keys] is their distance from
        the history's end (negative: in the history)."""
        last = self.seen.shape[1] - 1
        behind = self.seen[:, np.clip(relative, 0, last)].transpose(1, 0, 2)
        return np.where(relative[:, None] < 0, True, behind & (relative <= last)[:, None])


class BatchBuilder:
    """Puts segments together into one :class:`Inputs`. Indices are computed on the host, in numpy."""

    def __init__(self, memory: Memory, device: torch.device, dtype: torch.dtype) -> None:
        self.memory, self.table, self.device, self.dtype = memory, memory.rows.slots, device, dtype
        self.ids: list[Tensor] = []
        self.positions: list[Ints] = []
        self.write: list[Ints] = []
        self.segments: list[Segment] = []
        self.tokens = 0

    def add(self, ids: Tensor, rows: Ints, starts: Ints, tree: Tree) -> None:
        """Requests with equally many new tokens, the first of each at position ``starts``."""
        positions = starts[:, None] + tree.depth
        if self.memory.faults.on("rope-clamped"):
            positions = np.minimum(positions, 256)
        places = starts[:, None] + np.arange(tree.offset, tree.offset + len(tree.depth))
        keys = np.arange(int(places.max()) + 1)
        slots = self._tensor(self.table[rows, : len(keys)])
        mask = self._mask(tree.sees(keys - starts[:, None]))
        near, near_mask = slots, mask
        if self.memory.window:
            # Only the last window before the first query can be seen by a sliding layer.
            relative = np.arange(1 - self.memory.window, tree.offset + len(tree.depth))
            keys = starts[:, None] + relative
            near = self._tensor(self.memory.swa_slots(self.table[rows[:, None], np.maximum(keys, 0)]))
            reach = self.memory.window - self.memory.faults.on("window-short")
            inside = tree.depth[:, None] - tree.depth_of(relative) < reach
            seen = tree.sees(np.broadcast_to(relative, keys.shape))
            near_mask = self._mask(seen & inside & (keys >= 0)[:, None])
        segment = Segment(self.tokens, len(rows), len(tree.depth), (slots, near), (mask, near_mask))
        self.segments.append(segment)
        self.ids.append(ids)
        self.positions.append(positions.ravel())
        self.write.append(self.table[rows[:, None], places].ravel())
        self.tokens += positions.size

    def build(self, wanted: Sequence[int]) -> Inputs:
        write = np.concatenate(self.write)
        slots = self._tensor(write)
        return Inputs(
            ids=torch.cat(self.ids) if len(self.ids) > 1 else self.ids[0],
            positions=self._tensor(np.concatenate(self.positions)),
            write=(slots, self._tensor(self.memory.swa_slots(write)) if self.memory.window else slots),
            segments=self.segments,
            wanted=self._tensor(np.array(wanted, dtype=np.int64)),
        )

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _mask(self, seen: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
        """What is added to the scores: 0 where a key is seen, else minus infinity; [count, 1, queries,
        keys].
        """
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
        return torch.from_numpy(mask).to(device=self.device, dtype=self.dtype)


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The next token of each row. Deterministic: a row's seed and position give its random number."""
    chosen = logits.argmax(-1)
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + position)
            weights = (logits[row].float() / sampling.temperature).softmax(-1).cpu()
            chosen[row] = torch.multinomial(weights, 1, generator=generator)[0]
    return chosen
