"""A decoder's forward pass written from the papers, to judge the synthetic models without any engine's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_kvcheck.reference import synthetic

RECIPES = Path(__file__).parent.parent / "fixtures" / "models"


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [batch, tokens, heads, dim], halves paired."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Decoder:
    """The model of a recipe, in float32, without a cache: every call computes everything anew."""

    def __init__(self, name: str) -> None:
        recipe = synthetic.read_recipe(RECIPES / name)
        self.config: dict[str, Any] = recipe["config"]
        self.follows = torch.tensor(synthetic.permutation(recipe)) if recipe["kind"] == "target" else None
        weights = synthetic.weights_of(RECIPES / name)
        self.weights = {key: value.float() for key, value in weights.items()}

    def dense(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def attend(self, x: Tensor, layer: str, window: int | None, slot: tuple[int, int] | None = None) -> Tensor:
        """Self attention over [batch, tokens, width]. ``slot`` (a, b): b's KV lies where a's should."""
        config, (batch, tokens, _) = self.config, x.shape
        dim, eps = config["head_dim"], config["rms_norm_eps"]
        q, k, v = (self.dense(x, f"{layer}.{part}_proj").view(batch, tokens, -1, dim) for part in "qkv")
        if f"{layer}.q_norm.weight" in self.weights:
            q = norm(q, self.weights[f"{layer}.q_norm.weight"], eps)
            k = norm(k, self.weights[f"{layer}.k_norm.weight"], eps)
        place = torch.arange(tokens)
        q, k = rotate(q, place, config["rope_theta"]), rotate(k, place, config["rope_theta"])
        if slot:
            k[:, slot[0]], v[:, slot[0]] = k[:, slot[1]], v[:, slot[1]]
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        distance = place[:, None] - place
        unseen = (distance < 0) | (distance >= (window or tokens))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)
        return self.dense(mixed.reshape(batch, tokens, -1), f"{layer}.o_proj")

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        gate = torch.nn.functional.silu(self.dense(x, f"{layer}.gate_proj"))
        return self.dense(gate * self.dense(x, f"{layer}.up_proj"), f"{layer}.down_proj")

    def states(self, ids: Tensor, slot: tuple[int, int] | None = None) -> tuple[Tensor, list[Tensor]]:
        """The final hidden state of [batch, tokens] ids, and what goes into each layer."""
        config, eps = self.config, self.config["rms_norm_eps"]
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        x, inputs = self.weights["model.embed_tokens.weight"][ids], []
        for i, kind in enumerate(kinds):
            layer = f"model.layers.{i}"
            inputs.append(x)
            h = norm(x, self.weights[f"{layer}.input_layernorm.weight"], eps)
            window = config["sliding_window"] if kind == "sliding_attention" else None
            x = x + self.attend(h, f"{layer}.self_attn", window, slot)
            h = norm(x, self.weights[f"{layer}.post_attention_layernorm.weight"], eps)
            x = x + self.mlp(h, f"{layer}.mlp")
        return norm(x, self.weights["model.norm.weight"], eps), inputs

    def logits(self, ids: Tensor, slot: tuple[int, int] | None = None) -> Tensor:
        return self.dense(self.states(ids, slot)[0], "lm_head")

    def scores(self, ids: Tensor, slot: tuple[int, int] | None = None) -> Tensor:
        """Log-prob of every id but the first, [batch, tokens - 1]."""
        logprobs = self.logits(ids, slot)[:, :-1].log_softmax(-1)
        return logprobs.gather(2, ids[:, 1:, None])[..., 0]

    def greedy(self, prompts: Tensor, count: int) -> Tensor:
        """The prompts of [batch, tokens] with ``count`` greedy tokens after them."""
        for _ in range(count):
            prompts = torch.cat([prompts, self.logits(prompts)[:, -1:].argmax(-1)], 1)
        return prompts


class Draft(Decoder):
    """An EAGLE or EAGLE3 draft of ``target``: guesses the tokens after a history."""

    def __init__(self, name: str, target: Decoder) -> None:
        super().__init__(name)
        self.target = target
        self.third = "midlayer.hidden_norm.weight" in self.weights

    def guess(self, ids: Tensor, count: int) -> list[int]:
        """Drafts after ``ids`` [tokens], of which the target has run all but the last (it was just sampled)."""
        features, inputs = self.target.states(ids[None, :-1])
        head = self.target.weights["lm_head.weight"]
        if self.third:
            layers = len(inputs)
            taken = torch.cat([inputs[i] for i in (2, layers // 2, layers - 3)], -1)
            features, head = self.dense(taken, "fc"), self.weights["lm_head.weight"]
        tokens, guessed = ids[1:].tolist(), list[int]()
        for _ in range(count):
            embedded = self.weights["embed_tokens.weight"][torch.tensor(tokens)][None]
            output, carried = (self._eagle3 if self.third else self._eagle)(embedded, features)
            guessed.append(int((output[0, -1] @ head.T).argmax()))
            tokens.append(guessed[-1])
            features = torch.cat([features, carried[:, -1:]], 1)
        return guessed

    def _eagle(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.dense(torch.cat([embedded, features], -1), "fc")
        x = x + self.attend(x, "layers.0.self_attn", None)
        h = norm(x, self.weights["layers.0.post_attention_layernorm.weight"], self.config["rms_norm_eps"])
        x = x + self.mlp(h, "layers.0.mlp")
        return x, x

    def _eagle3(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.config["rms_norm_eps"]
        first = norm(embedded, self.weights["midlayer.input_layernorm.weight"], eps)
        second = norm(features, self.weights["midlayer.hidden_norm.weight"], eps)
        x = features + self.attend(torch.cat([first, second], -1), "midlayer.self_attn", None)
        h = norm(x, self.weights["midlayer.post_attention_layernorm.weight"], eps)
        x = x + self.mlp(h, "midlayer.mlp")
        return norm(x, self.weights["norm.weight"], eps), x
