"""EAGLE-style speculative decoding: a one-layer draft guesses, the target verifies, in one pass for all
guesses.

A round of a request whose first L tokens have KV: the draft continues the last sampled token by up to ``steps``
guesses (with ``topk`` > 1 by several chains), the target runs over all of them, and as many as agree with its
own choices are accepted; with the target's choice behind them that gives 1 to ``steps`` + 1 new tokens. Then
the draft runs over the same tokens with the target's hidden states, so that its KV is as good as the
target's.

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

from .batch import BatchBuilder, Entry, Request, Result, Tree, sample
from .cache import KVCache
from .decoding import Decoding
from .executor import Executor, Forward, rows_of
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

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """The likeliest next tokens of each row, [rows, count]."""
        return F.linear(hidden, self.target.head).topk(count).indices


class Fan:
    """The shape of a round's guesses: ``topk`` chains from the last sampled token, which is node 0.

    The chains share ``draft_tokens`` - 1 nodes, at most ``steps`` each, the likelier first.
    """

    def __init__(self, steps: int, topk: int, draft_tokens: int) -> None:
        self.steps, self.topk, self.nodes = steps, topk, draft_tokens
        left, first = draft_tokens - 1, 1
        chains: list[list[int]] = []
        for later in reversed(range(topk)):
            length = min(steps, left - later)
            chains.append([0, *range(first, first + length)])
            first, left = first + length, left - length
        self.lengths = [len(chain) - 1 for chain in chains]
        # path[c, d] is the node at depth d of chain c; short chains repeat their last node.
        self.path: Ints = np.array([chain + chain[-1:] * (steps + 1 - len(chain)) for chain in chains])
        depth = np.zeros(draft_tokens, dtype=np.int64)
        seen = np.eye(draft_tokens, dtype=np.bool_)
        for chain in chains:
            for at, node in enumerate(chain):
                depth[node] = at
                seen[node, chain[: at + 1]] = True
        self.tree = Tree(0, depth, seen)

    @property
    def slots(self) -> int:
        """Slots that a round needs behind the history, for verification or for drafting."""
        return max(self.nodes, self.topk * (self.steps - 1))

    def draft_step(self, step: int) -> Tree:
        """The tokens of one draft step, one a chain; each sees its own chain."""
        width = self.topk * (step + 1)
        seen = np.arange(width) % self.topk == np.arange(self.topk)[:, None]
        return Tree(self.topk * step, np.full(self.topk, step), seen)


class SpecExecutor(Executor):
    """Keeps, for each request row on the device: how many tokens have KV, and the draft's first guesses."""

    def __init__(
        self, model: Model, draft: Draft, fan: Fan, kv: tuple[Tensor, Tensor], memory: Memory, faults: Faults
    ) -> None:
        super().__init__(model, kv, memory, faults)
        rows = memory.rows.total
        self.draft, self.fan, self.tree = draft, fan, fan.tree
        self.path = self._indices(fan.path)
        self.length = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.guess = torch.zeros(rows, fan.topk, dtype=torch.int64, device=self.device)
        self.guess_hidden = torch.zeros(rows, model.config.hidden, dtype=self.dtype, device=self.device)

    def _decode_inputs(self, rows: Ints, starts: Ints) -> tuple[Tensor, Ints]:
        """The last token and the draft's chains; positions as the device knows them."""
        at = self._indices(rows)
        lengths = self.length.index_select(0, at).cpu().numpy()
        token = self.guess.index_select(0, at).ravel()
        hidden = self.guess_hidden.index_select(0, at).repeat_interleave(self.fan.topk, 0)
        guesses = [token]
        for step in range(self.fan.steps - 1):
            builder = BatchBuilder(self.memory, self.device, self.dtype)
            builder.add(token, rows, lengths, self.fan.draft_step(step))
            hidden = self.draft.forward(token, hidden, builder.build([]))
            token = self.draft.best(hidden, 1).ravel()
            guesses.append(token)
        table = torch.stack(guesses, 1).view(len(rows), self.fan.topk, self.fan.steps)
        chains = [table[:, chain, :length] for chain, length in enumerate(self.fan.lengths)]
        return torch.cat([self.last_token.index_select(0, at)[:, None], *chains], 1).ravel(), lengths

    @torch.inference_mode()
    def run(self, entries: Sequence[Entry]) -> Result:
        forward = self._forward(entries)
        final = [entry for entry in forward.entries if entry.final]
        for index, entry in enumerate(final):
            entry.sampled = index
        nodes = self.fan.nodes
        # The wanted row of each node; a prefill's one row stands for all of them.
        at = self._indices(
            [row for entry in final for row in (entry.rows if entry.decode else [entry.rows[-1]] * nodes)]
        ).view(len(final), nodes)
        rows = self._indices(rows_of(final))
        decodes = self._indices([entry.decode for entry in final]).bool()
        before = torch.where(decodes, self.length[rows], self._indices([entry.end - 1 for entry in final]))
        choice = self._sample(final, forward.logits, at, before)
        path, counts = self._accept(forward.inputs.ids[forward.inputs.wanted[at]], choice, decodes)
        tokens, taken = choice.gather(1, path), at.gather(1, path)
        last = counts[:, None] - 1
        self.last_token[rows] = tokens.gather(1, last)[:, 0]
        self._extend_draft(forward, at, choice, taken.gather(1, last)[:, 0], rows)
        if self.fan.topk > 1:
            self._move(rows[decodes], before[decodes], path[decodes], counts[decodes])
        self.length[rows] = before + counts
        logprobs, tops = self._logprobs(forward, at.ravel(), choice.ravel())
        if logprobs is not None:
            # The rows of a verified entry shall stand in the order of the accepted path.
            here = at[:, : self.fan.steps + 1]
            logprobs[here] = logprobs[taken]
            for part in tops or ():
                part[here] = part[taken]
        return Result(forward.entries, tokens, counts, logprobs, tops)

    def _accept(self, ids: Tensor, choice: Tensor, decodes: Tensor) -> tuple[Tensor, Tensor]:
        """The path of nodes [final, steps + 1] along which guesses agree longest, and how many tokens it
        gives.
        """
        guessed, expected = ids[:, self.path[:, 1:]], choice[:, self.path[:, :-1]]
        fresh = self.path[:, 1:] != self.path[:, :-1]  # short chains repeat their last node
        agree = ((guessed == expected) & fresh & decodes[:, None, None]).long().cumprod(2).sum(2)
        best = agree.argmax(1)
        return self.path[best], agree.gather(1, best[:, None])[:, 0] + 1

    def _move(self, rows: Tensor, before: Tensor, path: Tensor, counts: Tensor) -> None:
        """Bring the accepted path's KV to the slots right behind the history."""
        table = self._indices(self.memory.rows.slots)
        depth = torch.arange(path.shape[1], device=self.device)
        kept = depth < counts[:, None]
        source = table[rows[:, None], before[:, None] + torch.where(kept, path, depth)].ravel()
        target = table[rows[:, None], before[:, None] + depth].ravel()
        full, sliding = self.kv
        full[:, :, target] = full[:, :, source]
        self.draft.kv[:, target] = self.draft.kv[:, source]
        if self.memory.window:
            near, far = (self._indices(self.memory.swa_slots(s.cpu().numpy())) for s in (target, source))
            sliding[:, :, near] = sliding[:, :, far]

    def _sample(self, final: list[Entry], logits: Tensor, at: Tensor, before: Tensor) -> Tensor:
        """The target's own choice behind every node, [final, nodes]."""
        samplings = [entry.request.sampling for entry in final for _ in range(self.fan.nodes)]
        positions = [0] * len(samplings)
        if any(sampling.temperature > 0 for sampling in samplings):
            decoding = np.array([entry.decode for entry in final])
            depth = self.fan.tree.depth * decoding[:, None]
            positions = (before.cpu().numpy()[:, None] + depth + 1).ravel().tolist()
        return sample(logits.index_select(0, at.ravel()), samplings, positions).view(at.shape)

    def _extend_draft(self, forward: Forward, at: Tensor, choice: Tensor, last: Tensor, rows: Tensor) -> None:
        """Run the draft over the batch with each token's successor, and keep its guesses behind the last
        one.
        """
        inputs = forward.inputs
        shifted = inputs.ids.roll(-1)
        for entry, end in zip(forward.entries, _ends(forward.entries), strict=True):
            if not entry.decode and not entry.final:
                shifted[end - 1] = int(entry.request.ids[entry.end])
        shifted[inputs.wanted[at].ravel()] = choice.ravel()
        out = self.draft.forward(shifted, forward.hidden, inputs).index_select(0, inputs.wanted[last])
        self.guess[rows] = self.draft.best(out, self.fan.topk)
        self.guess_hidden[rows] = out


def _ends(entries: list[Entry]) -> Ints:
    """Where each entry's tokens end in the batch."""
    return np.cumsum([entry.end - entry.start for entry in entries])


class SpecV1(Decoding):
    """Synchronous: slots for one round, and what it did not accept is freed before the next."""

    def __init__(self, cache: KVCache, fan: Fan) -> None:
        super().__init__(cache)
        self.nodes, self.slots = fan.nodes, fan.slots

    def upto(self, request: Request, in_flight: int) -> int:
        return request.known + self.slots

    def prepare(self, request: Request, in_flight: int) -> Entry:
        return self._entry(request, in_flight, request.known, self.nodes)

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

    Each round that is not resolved yet may take ``slots``, and one more is for the bonus token, the
    target's own choice, whose KV the *next* round writes. That token is claimed before the round, so that a
    turn which ends while its last round is under way does not save a length that is one short.
    """

    def upto(self, request: Request, in_flight: int) -> int:
        return len(request.prompt) + len(request.output) + (self.slots + 1) * (1 + in_flight)

    def prepare(self, request: Request, in_flight: int) -> Entry:
        """``prepare_for_decode``: allocate ``draft_tokens + 1`` slots and claim the bonus token."""
        entry = self._entry(request, in_flight, request.known, self.nodes)
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
