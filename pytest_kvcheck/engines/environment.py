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
