"""An interpreter that has transformers: ours, or that of an engine's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

NONE = "no interpreter with transformers: set KVCHECK_SGLANG_PYTHON or KVCHECK_VLLM_PYTHON"


@cache
def interpreter() -> str | None:
    """The first that there is, or None."""
    for python in (
        sys.executable,
        os.environ.get("KVCHECK_SGLANG_PYTHON"),
        os.environ.get("KVCHECK_VLLM_PYTHON"),
    ):
        probe = "import importlib.util as u, sys; sys.exit(not u.find_spec('transformers'))"
        if python and subprocess.run([python, "-c", probe]).returncode == 0:
            return python
    return None
