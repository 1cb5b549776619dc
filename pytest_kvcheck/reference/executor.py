"""Runs a batch: turns entries into one forward pass and keeps the sampled tokens on the device.

The next batch reads its input ids there, so it can be launched before this one's results have been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .batch import BatchBuilder, Entry, Result, Tree, sample
from .faults import Faults
from .model import Inputs, Model
from .pools import Ints, Memory


@dataclass
class Forward:
    """A finished target pass: its entries in batch order, its inputs, the wanted logits, all hidden states."""

    entries: list[Entry]
    inputs: Inputs
    logits: Tensor
    hidden: Tensor


class Executor:
    """Plain decoding: one token a request. ``kv`` holds the pool tensors of full and of sliding layers."""

    tree = Tree.line(1)  # the shape of a decode step's tokens

    def __init__(self, model: Model, kv: tuple[Tensor, Tensor], memory: Memory, faults: Faults) -> None:
        self.model, self.kv, self.memory, self.faults = model, kv, memory, faults
        self.device, self.dtype = kv[0].device, kv[0].dtype
        self.last_token = torch.zeros(memory.rows.total, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry]) -> Result:
        """One forward pass; plain decoding reads nothing back from the device."""
        forward = self._forward(entries)
        final = [entry for entry in forward.entries if entry.final]
        for index, entry in enumerate(final):
            entry.sampled = index
        at = self._indices([entry.rows[-1] for entry in final])
        samplings = [entry.request.sampling for entry in final]
        tokens = sample(forward.logits.index_select(0, at), samplings, [entry.end for entry in final])
        self.last_token.index_copy_(0, self._indices(rows_of(final)), tokens)
        logprobs, tops = self._logprobs(forward, at, tokens)
        return Result(forward.entries, tokens[:, None], None, logprobs, tops)

    def _forward(self, entries: Sequence[Entry]) -> Forward:
        builder = BatchBuilder(self.memory, self.device, self.dtype)
        ordered: list[Entry] = []
        wanted: list[int] = []
        for (decode, queries), group in _groups(entries).items():
            rows, starts = rows_of(group), np.array([entry.start for entry in group])
            tree = self.tree if decode else Tree.line(queries)
            if decode:
                ids, starts = self._decode_inputs(rows, starts)
            else:
                chunks = [entry.request.ids[entry.start : entry.end] for entry in group]
                ids = torch.from_numpy(np.concatenate(chunks)).to(self.device)
            first = builder.tokens
            builder.add(ids, rows, starts, tree)
            if not decode and self.faults.on("stale-kv-slot"):
                for index, entry in enumerate(group):
                    if entry.request.session is not None and entry.start == entry.request.inherited > 0:
                        builder.write[-1][index * queries] = 0
            for index, entry in enumerate(group):
                begin = first + index * queries
                skip = 0 if decode else _first_wanted(entry)
                ordered.append(replace(entry, rows=range(len(wanted), len(wanted) + queries - skip)))
                wanted.extend(range(begin + skip, begin + queries))
        inputs = builder.build(wanted)
        return Forward(ordered, inputs, *self.model.forward(inputs, self.kv))

    def _decode_inputs(self, rows: Ints, starts: Ints) -> tuple[Tensor, Ints]:
        """Ids and first positions of requests that decode."""
        return self.last_token.index_select(0, torch.from_numpy(rows).to(self.device)), starts

    def _logprobs(
        self, forward: Forward, at: Tensor, sampled: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
        """Log-prob of what follows each wanted token: of ``sampled`` in the rows ``at``, else of the prompt."""
        if not any(entry.request.logprobs for entry in forward.entries):
            return None, None
        spread = forward.logits.float().log_softmax(-1)
        targets = torch.zeros(len(spread), dtype=torch.int64)
        for entry in forward.entries:
            known = entry.request.ids[entry.end - len(entry.rows) + 1 : entry.end + 1]
            if not entry.decode and len(known):
                targets[entry.rows[0] : entry.rows[0] + len(known)] = torch.from_numpy(known)
        targets = targets.to(self.device).index_copy_(0, at, sampled)
        tops = min(max(entry.request.tops for entry in forward.entries), spread.shape[1])
        best = spread.topk(tops) if tops else None
        return spread.gather(1, targets[:, None])[:, 0], (best.values, best.indices) if best else None

    def _indices(self, values: Sequence[int] | Ints) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


def rows_of(entries: Sequence[Entry]) -> Ints:
    """The rows of the table of slots."""
    return np.array([entry.holding.row for entry in entries], dtype=np.int64)


def _groups(entries: Sequence[Entry]) -> dict[tuple[bool, int], list[Entry]]:
    """Entries that can share one attention call: decodes, and extensions of equal length."""
    groups: dict[tuple[bool, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.decode, entry.end - entry.start), []).append(entry)
    return groups


def _first_wanted(entry: Entry) -> int:
    """How many leading tokens of a prefill chunk need no logits."""
    queries, request = entry.end - entry.start, entry.request
    if request.input_start >= 0 and len(request.prompt) > entry.start + 1:
        return min(max(request.input_start - entry.start, 0), queries - entry.final)
    return queries - entry.final
