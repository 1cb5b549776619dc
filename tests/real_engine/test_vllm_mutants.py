"""Each fault of a real vLLM is found and named; the same cells without a fault are silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm_mutants import MUTANTS, Mutant

MODELS = Path(__file__).parents[2] / "fixtures" / "models"
DEFAULTS = {"page_size": 32, "chunked_prefill": 128, "context_length": 1024, "pool_tokens": 16384}

pytestmark = [pytest.mark.real_engine("vllm"), pytest.mark.slow]


def run(tmp_path: Path, mutant: Mutant, env: dict[str, str], workloads: list[str]) -> list[dict[str, Any]]:
    """The cases of a matrix with the mutant's cell, by the plugin in a process of its own."""
    matrix = tmp_path / "mutant.yaml"
    model = {"path": str(MODELS / mutant.model)}
    if mutant.draft:
        model["draft"] = str(MODELS / mutant.draft)
    cell = {**DEFAULTS, **mutant.cell, "env": env}
    content = {
        "kvcheck": 1,
        "family": "vllm-mutants",
        "engine": "vllm",
        "model": model,
        "cells": {mutant.name: cell},
        "workloads": workloads,
    }
    matrix.write_text(json.dumps(content))  # JSON is YAML
    out = tmp_path / "out.json"
    options = ["--kvcheck-python", os.environ["KVCHECK_VLLM_PYTHON"], "--kvcheck-json", str(out)]
    options += ["--kvcheck-artifacts", str(tmp_path / "artifacts")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "kvcheck", "-p", "no:cacheprovider", str(matrix), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    cases: list[dict[str, Any]] = json.loads(out.read_text())["cases"]
    assert cases, done.stdout[-3000:]
    return cases


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_and_named(mutant: Mutant, tmp_path: Path) -> None:
    cases = run(tmp_path, mutant, mutant.env, [mutant.workload])
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("server-*.log"))
    assert f"kvcheck: 1 changes in {mutant.module}" in logs, "the patch was not applied"
    seen = [(case["id"], case["outcome"], case["reason"]) for case in cases]
    assert {case["outcome"] for case in cases} & mutant.outcomes, seen
    kinds = {
        kind for case in cases for finding in case["findings"] for kind in (finding["kind"], *finding["also"])
    }
    assert kinds & mutant.kinds, seen
    if mutant.owner and find_spec("zmq"):
        named = [finding for case in cases for finding in case["findings"] if finding["owner"]]
        assert any(mutant.owner in finding["owner"] for finding in named), seen
        assert any("By its block events" in text for finding in named for text in finding["evidence"])


def twins() -> list[list[Mutant]]:
    """The mutants that share a configuration: one clean server is the twin of all of them."""
    groups: dict[str, list[Mutant]] = {}
    for mutant in MUTANTS:
        groups.setdefault(json.dumps([mutant.model, mutant.draft, mutant.cell]), []).append(mutant)
    return list(groups.values())


@pytest.mark.parametrize("group", twins(), ids=lambda group: "+".join(mutant.name for mutant in group))
def test_the_clean_twin_is_silent(group: list[Mutant], tmp_path: Path) -> None:
    workloads = sorted({mutant.workload for mutant in group})
    cases = run(tmp_path, group[0], {"PYTHONPATH": group[0].env["PYTHONPATH"]}, workloads)
    assert len(cases) == len(workloads)
    assert [
        (case["id"], case["outcome"], case["reason"]) for case in cases if case["outcome"] != "passed"
    ] == []
