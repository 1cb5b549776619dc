#!/usr/bin/env python3
"""Makes the weights of a synthetic model from its recipe: ``python synthetic.py RECIPE_DIR OUT_DIR``.

Runs by path under any interpreter that has torch and safetensors, an engine's own for one, so nothing of the
rest of the package is imported. The folder holds what Hugging Face calls a model: ``config.json``,
``model.safetensors``, ``generation_config.json`` and a word-level tokenizer (``t17`` is id 17).

The models are not trained, they are built so that KV faults show:

* Row ``next[t]`` of ``lm_head`` is a scaled copy of the embedding of ``t``, so that the greedy next token is
  mostly a fixed permutation (one long cycle), which a draft model can guess.
* Attention and MLP are random and strong enough to overrule it now and then, and to move every log-prob when
  one token or one KV slot of the history is wrong.

The same recipe gives the same bytes everywhere: random numbers are sums of bytes of Python's own generator, in
integers, and torch only multiplies and rounds them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SPECIAL = ("<unk>", "<s>", "</s>")
"""Ids 0, 1 and 2. Their ``lm_head`` rows are zero: their logit is always 0, so greedy decoding does not end."""

ANCHOR = 4.0
"""The first component of every embedding. No layer writes to it, so that q and k can hold a constant part."""

Recipe = dict[str, Any]
Weights = dict[str, torch.Tensor]


class Noise:
    """Normally distributed tensors, one independent stream a name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, name: str, *shape: int, std: float) -> torch.Tensor:
        """A float32 tensor N(0, std). Eight random bytes sum to 1020 with variance 8 * (256**2 - 1) / 12."""
        count = torch.Size(shape).numel()
        raw = bytearray(random.Random(f"{self.seed}/{name}").randbytes(8 * count))
        sums = torch.frombuffer(raw, dtype=torch.uint8).view(count, 8).sum(1)
        return (sums - 1020).float().mul(std / (8 * (256**2 - 1) / 12) ** 0.5).view(shape)


def permutation(recipe: Recipe) -> list[int]:
    """``next[t]``, the token that mostly follows ``t``: one cycle through all ids but the special ones.

    Special ids lead into the cycle and nothing leads to them.
    """
    vocab = recipe["config"]["vocab_size"]
    order = list(range(len(SPECIAL), vocab))
    random.Random(f"{recipe['seed']}/permutation").shuffle(order)
    follows = dict(zip(order, order[1:] + order[:1], strict=True))
    return [follows.get(t, order[t % len(order)]) for t in range(vocab)]


def look_back(projection: torch.Tensor, strengths: list[float], dim: int) -> None:
    """Gives q or k of each head a constant part, so that a head looks back with weight ~ 1 / distance**a.

    The constant stands in one component of every rotary pair. Rotary frequencies are spaced evenly on a log
    scale, so the sum of their cosines falls by a constant with each doubling of the distance: a power law after
    softmax. (a = strength_q * strength_k / 3.3 with 32 components.) Without it attention flattens as the
    history grows, and with it the model behaves alike at every length, and feels a fault more the nearer it is.
    """
    for head, strength in enumerate(strengths):
        projection[head * dim : head * dim + dim // 2, 0] = strength / ANCHOR
        projection[head * dim + dim // 2 : (head + 1) * dim, 0] = 0


def decoder_layer(
    config: dict[str, Any], scales: dict[str, Any], noise: Noise, name: str, wide: int = 1
) -> Weights:
    """The weights of one layer; ``wide`` times the hidden size goes into q, k and v (2 in EAGLE3 drafts)."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def dense(part: str, rows: int, columns: int) -> torch.Tensor:
        scale = scales.get(part.split(".")[1], 1.0)
        return noise(f"{name}.{part}.weight", rows, columns, std=scale / columns**0.5)

    weights = {
        f"{name}.{part}.weight": dense(part, rows, columns)
        for part, rows, columns in (
            ("self_attn.q_proj", q_size, wide * hidden),
            ("self_attn.k_proj", kv_size, wide * hidden),
            ("self_attn.v_proj", kv_size, wide * hidden),
            ("self_attn.o_proj", hidden, q_size),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        )
    }
    if wide == 1:
        for part in ("q_proj", "k_proj"):
            look_back(weights[f"{name}.self_attn.{part}.weight"], scales[part.replace("proj", "recency")], dim)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{name}.{part}.weight"][0] = 0
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(hidden)
    if config["model_type"] == "mellum":
        for norm in ("q_norm", "k_norm"):
            weights[f"{name}.self_attn.{norm}.weight"] = torch.full((dim,), scales.get(norm, 1.0))
    return weights


def target_weights(recipe: Recipe) -> Weights:
    """A decoder with the names of Llama (and Mellum)."""
    config, scales, noise = recipe["config"], recipe["scales"], Noise(recipe["seed"])
    hidden = config["hidden_size"]
    embedding = noise("model.embed_tokens.weight", config["vocab_size"], hidden, std=1.0)
    embedding[:, 0] = ANCHOR
    head = torch.zeros_like(embedding)
    follows = permutation(recipe)
    for token in range(len(SPECIAL), config["vocab_size"]):
        head[follows[token]] = embedding[token] * scales["lm_head"]
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        weights |= decoder_layer(config, scales, noise, f"model.layers.{layer}")
    return weights


def eagle_weights(recipe: Recipe, target: Weights) -> Weights:
    """An EAGLE draft: the target's first layer over the token's embedding plus a little of the target's hidden
    state.

    EAGLE removes the first layer's input norm. ``fc.bias`` is written where the class has one (SGLang's).
    """
    hidden = recipe["config"]["hidden_size"]
    first = "model.layers.0."
    weights = {name.removeprefix("model."): value for name, value in target.items() if name.startswith(first)}
    del weights["layers.0.input_layernorm.weight"]
    weights["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    weights["fc.weight"] = torch.cat([torch.eye(hidden), recipe["scales"]["hidden"] * torch.eye(hidden)], dim=1)
    if recipe["fc_bias"]:
        weights["fc.bias"] = torch.zeros(hidden)
    return weights


def eagle3_weights(recipe: Recipe, target: Weights) -> Weights:
    """An EAGLE3 draft. The token's embedding reaches the output only through attention, so every head looks
    mostly at the position itself (q and k are equal) and carries its share of the embedding through (v and o
    are identities).
    """
    config, scales, noise = recipe["config"], recipe["scales"], Noise(recipe["seed"])
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights = decoder_layer(config, scales, noise, "midlayer", wide=2)
    nothing = torch.zeros(hidden, hidden)
    look = noise("midlayer.look", hidden, hidden, std=scales["look"] / hidden**0.5)
    weights["midlayer.self_attn.q_proj.weight"] = torch.cat([look, nothing], dim=1)
    weights["midlayer.self_attn.k_proj.weight"] = torch.cat([look, nothing], dim=1)
    weights["midlayer.self_attn.v_proj.weight"] = torch.cat([torch.eye(hidden), nothing], dim=1)
    weights["midlayer.self_attn.o_proj.weight"] = torch.eye(hidden)
    weights["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = noise("fc.weight", hidden, 3 * hidden, std=scales["fc"] / (3 * hidden) ** 0.5)
    weights["norm.weight"] = torch.ones(hidden)
    weights["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    weights["lm_head.weight"] = target["lm_head.weight"]
    weights["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    weights["t2d"] = torch.ones(vocab, dtype=torch.bool)
    return weights


def read_recipe(folder: Path) -> Recipe:
    """The recipe in ``folder``. Raises ``ValueError`` in words where there is none or it is not a recipe."""
    path = folder / "recipe.json"
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    needed = {"kind", "seed", "scales", "config"}
    if not isinstance(recipe, dict) or not needed <= recipe.keys():
        raise ValueError(f"{path} is not a recipe: expected an object with {', '.join(sorted(needed))}")
    return recipe


def weights_of(folder: Path) -> Weights:
    """All tensors of the model in ``folder``; floats in bfloat16, so that every engine starts from the same."""
    recipe = read_recipe(folder)
    kind = recipe["kind"]
    if kind == "target":
        weights = target_weights(recipe)
    elif kind in ("eagle", "eagle3"):
        target = target_weights(read_recipe(folder / recipe["target"]))
        weights = (eagle_weights if kind == "eagle" else eagle3_weights)(recipe, target)
    else:
        raise ValueError(f"{folder / 'recipe.json'}: unknown kind {kind!r}, expected target, eagle or eagle3")
    return {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().clone()
        for name, value in weights.items()
    }


def tokenizer_files(config: dict[str, Any]) -> dict[str, Any]:
    """A word-level tokenizer: ``t17`` is id 17, words are parted by spaces."""
    words = [*SPECIAL, *(f"t{i}" for i in range(len(SPECIAL), config["vocab_size"]))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(SPECIAL)],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {w: i for i, w in enumerate(words)},
                "unk_token": SPECIAL[0],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
        },
    }


def make(recipe_dir: Path, out: Path) -> None:
    """Write the model to ``out``, which must be absent or empty: it appears whole or not at all."""
    config = read_recipe(recipe_dir)["config"]
    weights = weights_of(recipe_dir)
    files = tokenizer_files(config) | {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
        },
    }
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        scratch.chmod(0o755)
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)  # a cache may be shared between users
        os.rename(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python synthetic.py RECIPE_DIR OUT_DIR", file=sys.stderr)
        return 2
    try:
        make(Path(argv[0]), Path(argv[1]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"{Path(argv[0]) / 'recipe.json'} or its target's lacks {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"cannot write the model to {argv[1]}: {error.strerror} (it must be absent or empty)",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
