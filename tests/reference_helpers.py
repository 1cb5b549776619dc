"""A tiny model on disk, an engine without HTTP, and a plain uncached forward to compare with."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pytest_kvcheck.reference.batch import Request, Sampling
from pytest_kvcheck.reference.engine import Engine, Options, build

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INNER = 64, 32, 2, 4, 2, 8, 48


def write_model(folder: Path, **extra: Any) -> Path:
    """Random Llama weights in Hugging Face layout; ``extra`` goes into the config."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
        **extra,
    }
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 2 / shape[-1] ** 0.5

    weights = {
        "model.embed_tokens.weight": noise(VOCAB, HIDDEN) * 2,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
    }
    # Token t is mostly followed by t + 1, so that a draft that sees the embedding guesses well.
    weights["lm_head.weight"] = (
        weights["model.embed_tokens.weight"].roll(1, 0) * 0.3 + noise(VOCAB, HIDDEN) * 0.3
    )
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= {
            name + "self_attn.q_proj.weight": noise(HEADS * DIM, HIDDEN),
            name + "self_attn.k_proj.weight": noise(KV_HEADS * DIM, HIDDEN),
            name + "self_attn.v_proj.weight": noise(KV_HEADS * DIM, HIDDEN),
            name + "self_attn.o_proj.weight": noise(HIDDEN, HEADS * DIM),
            name + "mlp.gate_proj.weight": noise(INNER, HIDDEN),
            name + "mlp.up_proj.weight": noise(INNER, HIDDEN),
            name + "mlp.down_proj.weight": noise(HIDDEN, INNER),
            name + "input_layernorm.weight": torch.ones(HIDDEN),
            name + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return _save(folder, config, weights)


def write_swa_model(folder: Path, window: int = 24) -> Path:
    """The same with sliding layers below a full one."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return write_model(folder, num_hidden_layers=3, layer_types=kinds, sliding_window=window)


def write_draft(folder: Path, target: Path) -> Path:
    """An EAGLE draft that guesses right some of the time: the target's first layer over the embedding."""
    weights = load_file(target / "model.safetensors")
    first = "model.layers.0."
    draft = {name.removeprefix("model."): w for name, w in weights.items() if name.startswith(first)}
    del draft["layers.0.input_layernorm.weight"]
    draft["fc.weight"] = torch.cat((torch.eye(HIDDEN), 0.1 * torch.eye(HIDDEN)), 1)
    config = json.loads((target / "config.json").read_text())
    return _save(folder, {**config, "num_hidden_layers": 1, "layer_types": None}, draft)


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@contextmanager
def strict() -> Iterator[None]:
    """Engines built inside check their memory at every iteration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        yield


class Client:
    """Drives an engine step by step and keeps each session's visible history."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)
        with strict():
            self.engine: Engine = build(options, lambda updates: None)
        self.scheduler = self.engine.scheduler
        self.number = 0

    def send(
        self,
        ids: list[int],
        max_new: int = 8,
        session: str | None = None,
        stop: frozenset[int] = frozenset(),
        **more: Any,
    ) -> Request:
        """Queue a request with log-probs of its output."""
        self.number += 1
        sampling = Sampling(max_new, stop=stop)
        request = Request(f"r{self.number:06d}", list(ids), sampling, logprobs=True, **more)
        self.scheduler.submit(request, session)
        return request

    def open(self, timeout: float | None = None) -> str:
        return self.scheduler.open_session(None, timeout)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def drain(self, bound: int = 20000) -> None:
        """Step until nothing runs or waits."""
        for _ in range(bound):
            self.scheduler.step()
            if self.scheduler.idle:
                self.scheduler.step()
                return
        raise AssertionError(f"not idle after {bound} iterations")

    @property
    def used(self) -> int:
        """Tokens that are neither free nor evictable."""
        accounts = self.scheduler.check.accounts().values()
        return sum(account.total - account.available - account.evictable for account in accounts)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def plain_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probs after every position of one sequence, [tokens, vocab], computed without any cache."""
    import torch.nn.functional as F

    config = model.config
    x = model.embed[torch.tensor(ids)]
    positions = torch.arange(len(ids))
    for index, layer in enumerate(model.layers):
        slides = config.sliding[index]
        h = F.rms_norm(x, (config.hidden,), layer.norm1, config.eps)
        qkv = F.linear(h, layer.qkv).view(len(ids), -1, config.head_dim)
        q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.q_norm is not None:
            q = F.rms_norm(q, (config.head_dim,), layer.q_norm, config.eps)
            k = F.rms_norm(k, (config.head_dim,), layer.k_norm, config.eps)
        rope = model.ropes[int(slides)]
        q, k = rope(q, positions), rope(k, positions)
        repeat = config.heads // config.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        distance = positions[:, None] - positions
        seen = distance >= 0
        if slides:
            seen &= distance < config.window
        scores = scores.masked_fill(~seen, -torch.inf)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), layer.out)
        h = F.rms_norm(x, (config.hidden,), layer.norm2, config.eps)
        gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    x = F.rms_norm(x, (config.hidden,), model.norm, config.eps)
    return F.linear(x, model.head).log_softmax(-1)


def worst_difference(model: Any, prompt: list[int], request: Request) -> float:
    """The greatest distance of a reported output log-prob from the plain forward's."""
    if not request.output:
        return 0.0
    with torch.inference_mode():
        table = plain_logprobs(model, prompt + request.output)
    worst = 0.0
    for index, (token, reported) in enumerate(zip(request.output, request.output_logprobs, strict=True)):
        worst = max(worst, abs(float(table[len(prompt) + index - 1, token]) - reported))
    return worst
