"""Makes the environment for vLLM on a CPU: ``python -m pytest_kvcheck.engines.vllm_cpu.install [FOLDER]``.

A finished environment of the same recipe is used as it is; one that was cut short is made anew. The last line
of output is the path of its interpreter.
"""

from __future__ import annotations

from pathlib import Path

from pytest_kvcheck.engines.installing import Environment

ENVIRONMENT = Environment("vllm-0.32.0", Path(__file__).with_name("recipe.txt"))

if __name__ == "__main__":
    raise SystemExit(ENVIRONMENT.main("pytest_kvcheck.engines.vllm_cpu.install"))
