#!/usr/bin/env python3
"""The shipped matrices as SGLang 0.5.12.post1 runs them on the H200: python matrices.py OUT [LAGUNA_DIR]

Three things differ, each through the overlay that a matrix has for it, or beside it:

* flags of the slim installation (no FlashAttention 3, no flashinfer): Triton attention, PyTorch sampling;
  float16, which is eight times finer than bfloat16 and what upstream's own EAGLE classes use;
* ``gpu_memory``, so that up to sixteen servers share the one GPU; the engine itself is told a half, since it
  measures what is free while its neighbours come and go (its pool has a size of its own);
* the sliding-window model: that release knows no Mellum, so tiny-swa is loaded as Laguna (laguna.py).

``fuzz`` gains cells with overlap, which a CPU cannot run, and with V1, which older releases have.

Also written: ``arms.yaml`` (two more arms), ``mutants.yaml`` and ``reference.yaml``.
JSON is YAML, so each part of a matrix is written as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("llama", "eagle_v1", "eagle_v2", "swa", "page256", "retract", "mixed_chunk", "abort", "fuzz")
FLAGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-piecewise-cuda-graph": True,
    "cuda-graph-max-bs": 8,
    "dtype": "float16",
    "mem-fraction-static": 0.5,
}
SHARED = {"features": {"gpu_memory": 0.06}, "args": FLAGS}
LLAMA = {
    "path": str(ROOT / "fixtures/models/tiny-llama"),
    "draft": str(ROOT / "fixtures/models/tiny-llama-eagle"),
}
DEFAULTS = {"chunked_prefill": 512, "context_length": 4096, "pool_tokens": 32768}
# Mutant -> what its line needs to run, and the workload that reaches it (tests/real_engine says the same).
MUTANTS: dict[str, tuple[dict[str, Any], str]] = {
    "session-release-frees-nothing": ({}, "kv-inheritance"),
    "session-row-kept": ({}, "kv-inheritance"),
    "session-lock-kept": ({}, "kv-inheritance"),
    "tail-free-nothing": ({"retract": {"interval": 3}}, "stress-concurrent"),
    "overshoot-untrimmed": ({"speculative": {"version": "v2"}}, "stress-concurrent"),
    "abort-release-forgotten": ({}, "nth-mid-abort"),
    "double-free": ({}, "kv-inheritance"),
    "stale-kv": ({}, "logprob-concurrent"),
}
TWINS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "clean": ({}, ["kv-inheritance", "nth-mid-abort", "logprob-concurrent"]),
    "clean-retract": ({"retract": {"interval": 3}}, ["stress-concurrent"]),
    "clean-v2": ({"speculative": {"version": "v2"}}, ["stress-concurrent"]),
}
V2: dict[str, Any] = {"speculative": {"version": "v2"}}
RETRACT: dict[str, Any] = {"retract": {"interval": 3}}
FUZZ: dict[str, dict[str, Any]] = {
    "eagle-v2-page-128": {**V2, "page_size": 128},
    "eagle-v2-retract": {**V2, **RETRACT},
    "eagle-v1": {"speculative": {"version": "v1"}},
    "eagle-v1-retract": {"speculative": {"version": "v1"}, **RETRACT},
}


def placed(value: Any, laguna: str) -> Any:
    """Model folders as absolute paths; the sliding-window ones as Laguna."""
    if isinstance(value, dict):
        return {key: placed(item, laguna) for key, item in value.items()}
    if isinstance(value, list):
        return [placed(item, laguna) for item in value]
    if isinstance(value, str) and value.startswith("../fixtures/models/"):
        name = value.rpartition("/")[2]
        return f"{laguna}/{name}" if name.startswith("tiny-swa") else str(ROOT / "fixtures/models" / name)
    return value


def write(out: Path, name: str, matrix: dict[str, Any]) -> None:
    lines = [f"{key}: {json.dumps(part, default=str)}" for key, part in ({"kvcheck": 1} | matrix).items()]
    (out / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def arms() -> dict[str, Any]:
    """Beside the shipped cells: V2's variable without overlap, which is V1 on this release; and V2 with the
    compile workers of torch, which come late and bring descriptors of their own.
    """
    return {
        "family": "arms",
        "model": LLAMA,
        "defaults": DEFAULTS,
        "cells": {
            "v2-asked-no-overlap": {
                "speculative": {"version": "v1"},
                "env": {"SGLANG_ENABLE_SPEC_V2": "1"},
            },
            "v2-compile-workers": {
                "speculative": {"version": "v2"},
                "env": {"TORCHINDUCTOR_COMPILE_THREADS": "16"},
            },
        },
        "engines": {"sglang": SHARED},
        "workloads": ["kv-inheritance", "logprob-concurrent"],
    }


def mutants(site: str) -> dict[str, Any]:
    path = os.pathsep.join((str(ROOT / "tests/real_engine/mutants"), site))
    cells: dict[str, Any] = {}
    for strict in (True, False):
        way = "strict" if strict else "silent"
        for name, (features, workload) in MUTANTS.items():
            env = {"KVCHECK_MUTANT": name, "PYTHONPATH": path}
            cells[f"{name}-{way}"] = {**features, "strict": strict, "env": env, "workloads": [workload]}
        for name, (features, workloads) in TWINS.items():
            cells[f"{name}-{way}"] = {**features, "strict": strict, "workloads": workloads}
    return {
        "family": "mutants",
        "model": LLAMA,
        "defaults": DEFAULTS,
        "cells": cells,
        "engines": {"sglang": SHARED},
        "workloads": ["kv-inheritance"],
    }


def main(out: Path, laguna: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        matrix = placed(YAML(typ="safe", pure=True).load(ROOT / "matrices" / f"{name}.yaml"), laguna)
        if name != "swa":
            matrix["model"] = LLAMA  # with the draft everywhere, so that equal cells are equal
        if name == "fuzz":
            known = {"known": matrix["cells"]["retract"]["known"]}
            matrix["cells"] |= {
                cell: more | (known if "retract" in more else {}) for cell, more in FUZZ.items()
            }
        write(out, name, matrix | {"engines": {"sglang": SHARED}})
        if name == "llama":
            small = {"reference": {"features": {"gpu_memory": 0.06}}}
            write(out, "reference", matrix | {"family": "reference", "engines": small})
    write(out, "arms", arms())
    write(out, "mutants", mutants(os.environ.get("PYTHONPATH", "").split(os.pathsep)[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else str(ROOT / "fixtures/models"))
