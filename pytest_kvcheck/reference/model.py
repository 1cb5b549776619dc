"""A Llama forward pass over a paged KV pool: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Also the shapes of a hybrid model: per-head norms on queries and keys, and a ``layer_types`` list that makes
some layers attend to a sliding window only. Weights come from safetensors in Hugging Face layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor


class ModelError(Exception):
    """A model folder that cannot be used; the message says what was expected and what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs of a ``config.json``. ``window`` 0: no layer slides."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    tied: bool
    eos: frozenset[int]
    sliding: tuple[bool, ...]
    window: int
    rope_theta: tuple[float, float]  # of full and of sliding layers

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Read ``folder/config.json``. Raises :class:`ModelError`."""
        path = folder / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except OSError as error:
            raise ModelError(
                f"--model-path: expected a folder with config.json and *.safetensors, found {path}: "
                f"{error.strerror}. Make one with `kvcheck models make DIR`."
            ) from error
        except ValueError as error:
            raise ModelError(f"{path}: expected JSON, found: {error}") from error
        try:
            return ModelConfig._from(raw)
        except KeyError as error:
            raise ModelError(
                f"{path}: expected the key {error.args[0]!r} of a Llama-like config, found none"
            ) from error

    @staticmethod
    def _from(raw: dict[str, Any]) -> ModelConfig:
        layers, heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
        kinds = raw.get("layer_types") or ["full_attention"] * layers
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
        eos = raw.get("eos_token_id")
        if raw.get("rope_scaling"):
            raise ModelError("config.json: rope_scaling is not supported by the reference engine; remove it")
        return ModelConfig(
            hidden=raw["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads", heads),
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            eps=raw.get("rms_norm_eps", 1e-6),
            max_positions=raw.get("max_position_embeddings", 4096),
            tied=raw.get("tie_word_embeddings", False),
            eos=frozenset([] if eos is None else eos if isinstance(eos, list) else [eos]),
            sliding=sliding,
            window=raw["sliding_window"] if any(sliding) else 0,
            rope_theta=(_theta(raw, "full_attention"), _theta(raw, "sliding_attention")),
        )


def _theta(raw: dict[str, Any], kind: str) -> float:
    """RoPE's base for a kind of layer, from any of the three places where configs put it."""
    rope = raw.get("rope_parameters") or {}
    rope = rope.get(kind, rope)
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


@dataclass
class Segment:
    """Requests that stand together in a batch and have equally many query tokens.

    Their tokens are ``[start, start + count * queries)`` of the batch. ``slots[kind]`` is [count, width], the
    pool slot of every key that they may see; ``mask[kind]`` is [count, 1, queries, width], added to the
    scores. ``kind`` is 0 for full and 1 for sliding layers.
    """

    start: int
    count: int
    queries: int
    slots: tuple[Tensor, Tensor]
    mask: tuple[Tensor, Tensor]


@dataclass
class Inputs:
    """One forward pass: ``ids``, ``positions`` and ``write[kind]`` (slots that take the new KV) are [tokens];
    ``wanted`` says for which tokens logits are needed."""

    ids: Tensor
    positions: Tensor
    write: tuple[Tensor, Tensor]
    segments: list[Segment]
    wanted: Tensor


class Weights:
    """The tensors of a model folder by name. Raises :class:`ModelError` where one is missing."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"--model-path: expected *.safetensors in {folder}, found none. "
                "`kvcheck models make DIR` makes the weights of a recipe."
            )
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                with safe_open(str(file), framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        self.tensors[name] = opened.get_tensor(name).to(device=device, dtype=dtype)
            except SafetensorError as error:
                raise ModelError(f"{file}: expected a safetensors file, found: {error}") from error

    def take(self, *names: str) -> Tensor:
        """The named tensors, one under the other: fused projections are one matrix product."""
        try:
            return torch.cat([self.tensors[name] for name in names]).contiguous()
        except KeyError as error:
            raise ModelError(f"{self.folder}: expected a weight named {error.args[0]!r}, found none") from error

    def maybe(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


class Rope:
    """Rotary embedding by tables of [positions, 1, head_dim]."""

    def __init__(self, config: ModelConfig, theta: float, positions: int, device: torch.device) -> None:
        half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
        angle = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), theta**-half)
        self.cos = torch.cat((angle.cos(), angle.cos()), -1).unsqueeze(1)
        # Rolling by half a head swaps the halves, so the sign of rotate_half sits in the table.
        self.sin = torch.cat((-angle.sin(), angle.sin()), -1).unsqueeze(1)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` is [tokens, heads, head_dim]."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class Layer:
    """One decoder layer. ``first_norm`` False: the input comes normed already (EAGLE's draft layer)."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, first_norm: bool = True) -> None:
        self.config = config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self.qkv = weights.take(*(f"{attention}{name}_proj.weight" for name in "qkv"))
        self.out = weights.take(attention + "o_proj.weight")
        self.gate_up = weights.take(mlp + "gate_proj.weight", mlp + "up_proj.weight")
        self.down = weights.take(mlp + "down_proj.weight")
        self.norm1 = weights.take(prefix + "input_layernorm.weight") if first_norm else None
        self.norm2 = weights.take(prefix + "post_attention_layernorm.weight")
        self.q_norm, self.k_norm = (
            weights.maybe(attention + "q_norm.weight"),
            weights.maybe(attention + "k_norm.weight"),
        )

    def forward(self, x: Tensor, batch: Inputs, rope: Rope, kv: Tensor, kind: int) -> Tensor:
        """``x`` is [tokens, hidden]; ``kv`` is this layer's [2, slots, kv_heads, head_dim], written in
        place.
        """
        config = self.config
        h = x if self.norm1 is None else F.rms_norm(x, (config.hidden,), self.norm1, config.eps)
        qkv = F.linear(h, self.qkv).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        qk, v = qkv[:, : -config.kv_heads], qkv[:, -config.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = F.rms_norm(qk[:, : config.heads], (config.head_dim,), self.q_norm, config.eps)
            k = F.rms_norm(qk[:, config.heads :], (config.head_dim,), self.k_norm, config.eps)
            qk = torch.cat((q, k), 1)
        qk = rope(qk, batch.positions)
        kv[0].index_copy_(0, batch.write[kind], qk[:, config.heads :])
        kv[1].index_copy_(0, batch.write[kind], v)
        attended = [attend(qk[:, : config.heads], kv, segment, kind) for segment in batch.segments]
        x = x + F.linear(torch.cat(attended) if len(attended) > 1 else attended[0], self.out)
        h = F.rms_norm(x, (config.hidden,), self.norm2, config.eps)
        gate, up = F.linear(h, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


def attend(q: Tensor, kv: Tensor, segment: Segment, kind: int) -> Tensor:
    """Attention of one segment against the pool; [tokens of the segment, heads * head_dim]."""
    tokens = segment.count * segment.queries
    query = q[segment.start : segment.start + tokens].view(segment.count, segment.queries, *q.shape[1:])
    slots = segment.slots[kind]
    shape = (segment.count, slots.shape[1], *kv.shape[2:])
    flat = slots.reshape(-1)
    keys = kv[0].flatten(1).index_select(0, flat).view(shape).transpose(1, 2)
    values = kv[1].flatten(1).index_select(0, flat).view(shape).transpose(1, 2)
    if segment.queries == 1:
        # With one query a head, the heads that share a key head can stand as its queries: a third faster.
        query = query.view(segment.count, kv.shape[2], -1, kv.shape[3])
        return F.scaled_dot_product_attention(query, keys, values, segment.mask[kind]).reshape(tokens, -1)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, segment.mask[kind], enable_gqa=True
    )
    return mixed.transpose(1, 2).reshape(tokens, -1)


class Model:
    """The target model. ``kv`` holds one pool tensor a kind of layer, [layers, 2, slots, kv_heads,
    head_dim].
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, positions: int) -> None:
        self.config = config = ModelConfig.load(folder)
        weights = Weights(folder, dtype, device)
        self.embed = weights.take("model.embed_tokens.weight")
        self.head = self.embed if config.tied else weights.take("lm_head.weight")
        self.norm = weights.take("model.norm.weight")
        self.layers = [Layer(config, weights, f"model.layers.{i}.") for i in range(config.layers)]
        self.ropes = [Rope(config, theta, positions, device) for theta in config.rope_theta]
        # Where a layer's KV lies: which kind of pool, and which layer of it.
        self.place = [
            (int(slides), config.sliding[:i].count(slides)) for i, slides in enumerate(config.sliding)
        ]

    def forward(self, batch: Inputs, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits of the wanted tokens [wanted, vocab] and the last hidden state of every token [tokens,
        hidden].
        """
        x = self.embed.index_select(0, batch.ids)
        for layer, (kind, index) in zip(self.layers, self.place, strict=True):
            x = layer.forward(x, batch, self.ropes[kind], kv[kind][index], kind)
        x = F.rms_norm(x, (self.config.hidden,), self.norm, self.config.eps)
        return F.linear(x.index_select(0, batch.wanted), self.head), x
