#!/usr/bin/env python3
"""tiny-swa in the form of Laguna, which SGLang 0.5.12 gives a sliding-window pool: python laguna.py FROM OUT

Laguna (dense layers) is Mellum with one thing more: each head's output is multiplied by softplus(g_proj(x)).
With g_proj = 0 that is ln 2, which the output projection takes back. ``FROM`` is a folder with weights.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main(source: Path, out: Path) -> None:
    out.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    for name in [name for name in weights if name.endswith("self_attn.o_proj.weight")]:
        weights[name] = (weights[name].float() / math.log(2)).to(weights[name].dtype)
        gate = torch.zeros(heads, hidden, dtype=weights[name].dtype)
        weights[name.replace("o_proj", "g_proj")] = gate
    config |= {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "num_attention_heads_per_layer": [heads] * config["num_hidden_layers"],
        "shared_expert_intermediate_size": config["moe_intermediate_size"],
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
