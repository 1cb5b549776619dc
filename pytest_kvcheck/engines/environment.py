"""Questions to an engine's own interpreter, asked without importing the engine."""

from __future__ import annotations

import subprocess
from functools import cache

_ASK = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


@cache
def package_version(python: str, package: str, advice: str) -> str:
    """The version of a package in that interpreter's environment.

    Raises ``LookupError`` with one paragraph: what was looked for, where, and ``advice``.
    """
    try:
        run = subprocess.run(
            [python, "-c", _ASK, package], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        found = error.strerror or error
        raise LookupError(
            f"expected a Python interpreter with {package} at {python}, found {found}; {advice}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LookupError(f"{python} did not say within 60 s whether it has {package}; {advice}") from error
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        why = "" if "PackageNotFoundError" in last else f" ({last[:200]})"
        raise LookupError(f"expected {package} in the environment of {python}, found none{why}; {advice}")
    return run.stdout.strip()


_EXACT = ("float32", "float16", "bfloat16")
_SHORT = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


def precision_of(dtype: object, quantization: object, kv_cache: object) -> str:
    """:meth:`Engine.precision` from an engine's own words, of which "auto" and None say nothing."""
    name = str(dtype or "auto").removeprefix("torch.")
    cache = str(kv_cache or "auto").removeprefix("torch.")
    cache = _SHORT.get(cache, cache)
    if quantization not in (None, "", "None"):
        raise LookupError(f"the weights are quantised ({quantization})")
    if cache not in ("auto", *_EXACT):
        raise LookupError(f"the KV cache is quantised ({cache})")
    name = _SHORT.get(name, name)
    return name if name in _EXACT else ""
