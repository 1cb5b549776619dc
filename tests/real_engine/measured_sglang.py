"""The SGLang mutants as ``kvcheck faults --measure --engine sglang --mutants`` wants them."""

from __future__ import annotations

from real_engine_helpers import MUTANTS, REPOSITORY
from test_sglang_mutants import BOTH_WAYS, CASES, features, mutants

from pytest_kvcheck.mutants import Mutant

DEFAULTS = {"chunked_prefill": 256, "context_length": 2048, "pool_tokens": 16384, "max_running": 16}
MODELS = REPOSITORY / "fixtures" / "models"


def _model(name: str) -> dict[str, str]:
    draft = mutants.BY_NAME[name].feature == "speculative"
    return {
        "path": str(MODELS / "tiny-llama"),
        **({"draft": str(MODELS / "tiny-llama-eagle")} if draft else {}),
    }


SUBJECTS = [
    Mutant(
        name=name,
        kinds=frozenset(kinds),
        features={**DEFAULTS, **features(mutants.BY_NAME[name], strict=True)},
        workload=workload,
        env={"KVCHECK_MUTANT": name, "PYTHONPATH": str(MUTANTS)},
        model=_model(name),
        checks=("on", "off") if name in BOTH_WAYS else ("off",),
    )
    for name, (workload, kinds) in CASES.items()
]
