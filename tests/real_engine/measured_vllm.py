"""The vLLM mutants as ``kvcheck faults --measure --engine vllm --mutants`` wants them."""

from __future__ import annotations

from test_vllm_mutants import DEFAULTS, MODELS
from vllm_mutants import MUTANTS
from vllm_mutants import Mutant as Change

from pytest_kvcheck.mutants import Mutant


def _model(change: Change) -> dict[str, str]:
    draft = {"draft": str(MODELS / change.draft)} if change.draft else {}
    return {"path": str(MODELS / change.model), **draft}


SUBJECTS = [
    Mutant(
        name=change.name,
        kinds=change.kinds,
        features={**DEFAULTS, **change.cell},
        workload=change.workload,
        env=change.env,
        model=_model(change),
        twin_env={"PYTHONPATH": change.env["PYTHONPATH"]},
    )
    for change in MUTANTS
]
