"""EAGLE-style speculative decoding: a one-layer draft guesses, the target verifies, in one pass for all
guesses.

A round of a request whose first L tokens have KV: the draft continues the last sampled token by ``steps``
tokens, the target runs over these ``width`` = steps + 1 tokens, and as many guesses as agree with its own
choices are accepted; with the target's choice behind them that gives 1 to ``width`` new tokens. Then the
draft runs over the same tokens with the target's hidden states, so that its KV is as good as the target's.

The accounting is in :class:`SpecV1` (a round is resolved before the next is planned) and :class:`SpecV2` (it is
resolved while the next runs).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import BatchBuilder, Entry, Request, Result, sample
from .cache import KVCache
from .decoding import Decoding
from .executor import Executor, rows_of
from .faults import Faults
from .model import Inputs, Layer, Model, ModelConfig, ModelError, Rope, Weights
from .pools import Ints, Memory


class Draft:
    """An EAGLE draft in the layout of ``LlamaForCausalLMEagle``: ``fc`` over [embedding, hidden], one layer.

    Embedding and head are the target's. ``kv`` is its own pool, [2, slots, kv_heads, head_dim], in the slots of
    the target's full pool.
    """

    def __init__(self, folder: Path, target: Model, kv: Tensor, positions: int) -> None:
        config = ModelConfig.load(folder)
        if config.hidden != target.config.hidden or config.vocab != target.config.vocab:
            raise ModelError(
                f"--speculative-draft-model-path: expected hidden size {target.config.hidden} and vocabulary "
                f"{target.config.vocab} as the target has, found {config.hidden} and {config.vocab} in {folder}"
            )
        weights = Weights(folder, kv.dtype, kv.device)
        self.target, self.kv = target, kv
        self.fc = weights.take("fc.weight")
        self.bias = weights.maybe("fc.bias")
        self.layer = Layer(config, weights, "layers.0.", first_norm=False)
        self.rope = Rope(config, config.rope_theta[0], positions, kv.device)

    def forward(self, ids: Tensor, hidden: Tensor, batch: Inputs) -> Tensor:
        """Hidden states [tokens, hidden] behind ``ids``, each given the hidden state of the token before it."""
        x = F.linear(torch.cat((self.target.embed.index_select(0, ids), hidden), -1), self.fc, self.bias)
        return self.layer.forward(x, batch, self.rope, self.kv, 0)

    def best(self, hidden: Tensor) -> Tensor:
        """The likeliest next token of each row."""
        return F.linear(hidden, self.target.head).argmax(-1)


class SpecExecutor(Executor):
    """Keeps, for each request row on the device: how many tokens have KV, and the draft's first guess."""

    def __init__(
        self, model: Model, draft: Draft, steps: int, kv: tuple[Tensor, Tensor], memory: Memory, faults: Faults
    ) -> None:
        super().__init__(model, kv, memory, faults)
        rows = memory.rows.total
        self.draft, self.steps = draft, steps
        self.length = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.guess = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.guess_hidden = torch.zeros(rows, model.config.hidden, dtype=self.dtype, device=self.device)

    def _decode_inputs(self, rows: Ints, starts: Ints) -> tuple[Tensor, Ints]:
        """The last token and the draft's continuation; positions as the device knows them."""
        at = self._indices(rows)
        lengths = self.length.index_select(0, at).cpu().numpy()
        token, hidden = self.guess.index_select(0, at), self.guess_hidden.index_select(0, at)
        chain = [self.last_token.index_select(0, at), token]
        for step in range(self.steps - 1):
            builder = BatchBuilder(self.memory, self.device, self.dtype)
            builder.add(token, rows, lengths + step, 1)
            hidden = self.draft.forward(token, hidden, builder.build([]))
            token = self.draft.best(hidden)
            chain.append(token)
        return torch.stack(chain, 1).ravel(), lengths

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry]) -> Result:
        forward = self._forward(entries)
        final = [entry for entry in forward.entries if entry.final]
        width = self.steps + 1
        rows = self._indices(rows_of(final))
        # Every final entry gets `width` columns of wanted rows; a prefill's one row stands in all of them.
        at = self._indices(
            [row for entry in final for row in (entry.rows if entry.decode else [entry.rows[-1]] * width)]
        ).view(len(final), width)
        decodes = self._indices([entry.decode for entry in final]).bool()
        before = torch.where(decodes, self.length[rows], self._indices([entry.end - 1 for entry in final]))
        tokens = self._sample(final, forward.logits, at, before)
        inputs = forward.inputs.ids[forward.inputs.wanted[at]]
        agree = (inputs[:, 1:] == tokens[:, :-1]) & decodes[:, None]
        counts = agree.long().cumprod(1).sum(1) + 1
        self.last_token[rows] = tokens.gather(1, counts[:, None] - 1)[:, 0]
        self.length[rows] = before + counts
        self._extend_draft(forward.entries, forward.inputs, forward.hidden, at, tokens, counts, rows)
        for index, entry in enumerate(final):
            entry.sampled = index
        logprobs, tops = self._logprobs(forward, at.ravel(), tokens.ravel())
        return Result(forward.entries, tokens, counts, logprobs, tops)

    def _sample(self, final: list[Entry], logits: Tensor, at: Tensor, before: Tensor) -> Tensor:
        samplings = [entry.request.sampling for entry in final for _ in range(at.shape[1])]
        positions = [0] * len(samplings)
        if any(sampling.temperature > 0 for sampling in samplings):
            decoding = np.array([entry.decode for entry in final])
            offsets = np.arange(1, at.shape[1] + 1) * decoding[:, None] + ~decoding[:, None]
            positions = (before.cpu().numpy()[:, None] + offsets).ravel().tolist()
        return sample(logits.index_select(0, at.ravel()), samplings, positions).view(at.shape)

    def _extend_draft(
        self,
        entries: list[Entry],
        inputs: Inputs,
        hidden: Tensor,
        at: Tensor,
        tokens: Tensor,
        counts: Tensor,
        rows: Tensor,
    ) -> None:
        """Run the draft over the batch with each token's successor, and keep its guess behind the last one."""
        shifted = inputs.ids.roll(-1)
        for entry, end in zip(entries, _ends(entries), strict=True):
            if not entry.decode and not entry.final:
                shifted[end - 1] = int(entry.request.ids[entry.end])
        sampled_at = inputs.wanted[at]
        shifted[sampled_at.ravel()] = tokens.ravel()
        out = self.draft.forward(shifted, hidden, inputs)
        last = out.index_select(0, sampled_at.gather(1, counts[:, None] - 1)[:, 0])
        self.guess[rows] = self.draft.best(last)
        self.guess_hidden[rows] = last


def _ends(entries: list[Entry]) -> Ints:
    """Where each entry's tokens end in the batch."""
    return np.cumsum([entry.end - entry.start for entry in entries])


class SpecV1(Decoding):
    """Synchronous: slots for one round, and what it did not accept is freed before the next."""

    def __init__(self, cache: KVCache, width: int) -> None:
        super().__init__(cache)
        self.width = width

    def upto(self, request: Request, in_flight: int) -> int:
        return request.known + self.width

    def prepare(self, request: Request, in_flight: int) -> Entry:
        return self._entry(request, in_flight, request.known, self.width)

    def resolve(self, entry: Entry) -> None:
        holding = entry.holding
        holding.committed += entry.count
        if self.cache.faults.on("spec-reject-slots-kept"):
            holding.allocated = holding.committed
        else:
            self.cache.memory.cut(holding, holding.committed)
        _count_round(entry)


class SpecV2(SpecV1):
    """Overlapped: a round is planned before the last one's result is known.

    Each round that is not resolved yet may take ``width`` slots, and one more is for the bonus token, the
    target's own choice, whose KV the *next* round writes. That token is claimed before the round, so that a
    turn which ends while its last round is under way does not save a length that is one short.
    """

    def upto(self, request: Request, in_flight: int) -> int:
        return len(request.prompt) + len(request.output) + (self.width + 1) * (1 + in_flight)

    def prepare(self, request: Request, in_flight: int) -> Entry:
        """``prepare_for_decode``: allocate ``draft_tokens + 1`` slots and claim the bonus token."""
        entry = self._entry(request, in_flight, request.known, self.width)
        if not self.cache.faults.on("bonus-slot-race"):
            entry.holding.committed += 1
        return entry

    def resolve(self, entry: Entry) -> None:
        """``resolve_spec_overlap_token_ids``: what was accepted beyond the bonus token, one iteration later."""
        entry.holding.committed += entry.count - 1
        if self.cache.faults.on("bonus-claimed-twice"):
            entry.holding.committed += 1
        _count_round(entry)


def _count_round(entry: Entry) -> None:
    rounds = entry.request.accepted
    rounds[entry.count - 1] = rounds.get(entry.count - 1, 0) + 1
