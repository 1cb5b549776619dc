"""Runs a batch: turns entries into one forward pass and keeps the sampled tokens on the device.

The next batch reads its input ids there, so it can be launched before this one's results have been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .batch import BatchBuilder, Entry, Result, sample
from .faults import Faults
from .model import Model
from .pools import Ints


class Executor:
    """``table`` is the table of slots, [rows, width]; ``kv`` the pool tensors of full and of sliding layers."""

    def __init__(self, model: Model, kv: tuple[Tensor, Tensor], table: Ints, faults: Faults) -> None:
        self.model, self.kv, self.table, self.faults = model, kv, table, faults
        self.device, self.dtype = kv[0].device, kv[0].dtype
        self.last_token = torch.zeros(len(table), dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry]) -> Result:
        """One forward pass; nothing is read back from the device."""
        builder = BatchBuilder(self.table, self.device, self.dtype)
        ordered: list[Entry] = []
        wanted: list[int] = []
        for (decode, queries), group in _groups(entries).items():
            rows = np.array([_row(entry) for entry in group])
            if decode:
                ids = self.last_token.index_select(0, torch.from_numpy(rows).to(self.device))
            else:
                chunks = [entry.request.ids[entry.start : entry.end] for entry in group]
                ids = torch.from_numpy(np.concatenate(chunks)).to(self.device)
            first = builder.tokens
            builder.add(ids, rows, np.array([entry.start for entry in group]), queries)
            if not decode and self.faults.on("stale-kv-slot"):
                for index, entry in enumerate(group):
                    if (
                        entry.request.session is not None
                        and entry.start
                        and entry.start == entry.request.inherited
                    ):
                        builder.write[-1][index * queries] = 0
            for index, entry in enumerate(group):
                begin = first + index * queries
                skip = _first_wanted(entry)
                ordered.append(replace(entry, rows=range(len(wanted), len(wanted) + queries - skip)))
                wanted.extend(range(begin + skip, begin + queries))
        logits, _ = self.model.forward(builder.build(wanted), self.kv)
        return self._result(ordered, logits)

    def _result(self, entries: list[Entry], logits: Tensor) -> Result:
        sampling = [entry for entry in entries if entry.final]
        for index, entry in enumerate(sampling):
            entry.sampled = index
        last_rows = [entry.rows[-1] for entry in sampling]
        at = torch.tensor(last_rows, dtype=torch.int64, device=self.device)
        samplings = [entry.request.sampling for entry in sampling]
        next_ids = sample(logits.index_select(0, at), samplings, [entry.end for entry in sampling])
        rows = torch.tensor([_row(entry) for entry in sampling], dtype=torch.int64, device=self.device)
        self.last_token.index_copy_(0, rows, next_ids)
        if not any(entry.request.logprobs for entry in entries):
            return Result(entries, next_ids, None, None)
        spread = logits.float().log_softmax(-1)
        targets = torch.zeros(len(logits), dtype=torch.int64)
        for entry in entries:
            known = entry.request.ids[entry.end - len(entry.rows) + 1 : entry.end + 1]
            if not entry.decode and len(known):
                targets[entry.rows[0] : entry.rows[0] + len(known)] = torch.from_numpy(known)
        targets = targets.to(self.device).index_copy_(0, at, next_ids)
        tops = max((entry.request.tops for entry in entries), default=0)
        return Result(
            entries,
            next_ids,
            spread.gather(1, targets[:, None])[:, 0],
            tuple(spread.topk(min(tops, spread.shape[1]))) if tops else None,  # type: ignore[arg-type]
        )


def _row(entry: Entry) -> int:
    assert entry.request.holding is not None
    return entry.request.holding.row


def _groups(entries: Sequence[Entry]) -> dict[tuple[bool, int], list[Entry]]:
    """Entries that can share one attention call: decodes, and extensions of equal length."""
    groups: dict[tuple[bool, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.decode, entry.end - entry.start), []).append(entry)
    return groups


def _first_wanted(entry: Entry) -> int:
    """How many leading tokens of the entry need no logits."""
    queries = entry.end - entry.start
    request = entry.request
    if not entry.decode and request.input_start >= 0 and len(request.prompt) > entry.start + 1:
        return min(max(request.input_start - entry.start, 0), queries - entry.final)
    return queries - entry.final
