"""An EAGLE draft as vLLM wants it. Checkpoints are often written for SGLang's class, which differs twice.

vLLM finds its class under the name ``EagleLlamaForCausalLM`` and its ``fc`` has no bias. A bias of zeros is the
same draft, so it may go; any other is refused. Files are read and written by hand: safetensors is simple (a
length, a JSON header, the tensors' bytes) and the package for it is no dependency.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

FOREIGN = "LlamaForCausalLMEagle"
OWN = "EagleLlamaForCausalLM"
BIAS = "fc.bias"


def as_vllm_reads(draft: Path, scratch: Path) -> Path:
    """``draft`` itself where vLLM can read it, else a converted copy below ``scratch``.

    Raises ``ValueError`` where the draft has a bias that vLLM's class cannot hold.
    """
    config_file = draft / "config.json"
    if not config_file.is_file():
        return draft  # a hub id: vLLM fetches and judges it
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.get("architectures") != [FOREIGN]:
        return draft
    copy = scratch / "draft-for-vllm"
    copy.mkdir(parents=True, exist_ok=True)
    for file in draft.iterdir():
        target = copy / file.name
        if file.suffix == ".safetensors":
            target.write_bytes(_without_bias(file))
        elif file.is_file():
            target.write_bytes(file.read_bytes())
    config["architectures"] = [OWN]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def _without_bias(file: Path) -> bytes:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = data[8 + length :]
    if BIAS in header:
        start, end = header.pop(BIAS)["data_offsets"]
        if any(tensors[start:end]):
            raise ValueError(
                f"{file}: expected no fc.bias, or one of zeros (vLLM's EAGLE class has none), found other "
                "values; give a draft without it"
            )
        tensors = tensors[:start] + tensors[end:]
        for entry in header.values():
            if "data_offsets" in entry and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [offset - (end - start) for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tensors
