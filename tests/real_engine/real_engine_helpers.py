"""One run of the plugin against a real SGLang, in a process of its own, and its result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
MUTANTS = Path(__file__).parent / "mutants"
DEVICE = os.environ.get("KVCHECK_SGLANG_DEVICE", "cpu")
# Start, workload, replay and stop of one server took half a minute alone and five minutes on a busy machine.
RUN_BOUND = 1500


@dataclass(frozen=True)
class Run:
    """``cases`` as in ``--kvcheck-json``; ``log`` is what every server of the run printed."""

    code: int
    cases: list[dict[str, Any]]
    output: str
    log: str

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [finding for case in self.cases for finding in case["findings"]]

    def of(self, workload: str) -> dict[str, Any]:
        return next(case for case in self.cases if case["id"].endswith(f"::{workload}"))


def run_sglang(
    folder: Path,
    features: Mapping[str, Any],
    workloads: Sequence[str | Mapping[str, Any]],
    env: Mapping[str, str] | None = None,
    family: str = "llama",
    model: Mapping[str, str] | None = None,
) -> Run:
    """Run one cell's workloads. JSON is YAML, so each part of the matrix is written as JSON."""
    models = REPOSITORY / "fixtures" / "models"
    named = model or {"path": "tiny-llama"}
    matrix = {
        "kvcheck": 1,  # must come first: that is how a matrix is told from any other file
        "family": family,
        "engine": "sglang",
        "model": {key: str(models / name) for key, name in named.items()},
        "defaults": {"chunked_prefill": 256, "context_length": 2048, "pool_tokens": 16384, "max_running": 16},
        "cells": {"cell": {**features, "env": dict(env or {})}},
        "workloads": list(workloads),
    }
    lines = [f"{key}: {json.dumps(part)}" for key, part in matrix.items()]
    (folder / "matrix.yaml").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pytest", "-p", "kvcheck", "matrix.yaml", "-p", "no:cacheprovider"]
    options = {
        "python": os.environ["KVCHECK_SGLANG_PYTHON"],
        "device": DEVICE,
        "json": "out.json",
        "artifacts": "artifacts",
    }
    command += [f"--kvcheck-{name}={value}" for name, value in options.items()]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=folder, env=inherited, capture_output=True, text=True, timeout=RUN_BOUND, check=False
    )
    output = done.stdout + done.stderr
    out = folder / "out.json"
    cases = json.loads(out.read_text())["cases"] if out.exists() else []
    logs = sorted((folder / "artifacts").rglob("*.log"))
    return Run(done.returncode, cases, output, "\n".join(log.read_text(errors="replace") for log in logs))
