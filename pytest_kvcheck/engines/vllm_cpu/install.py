"""Makes the environment for vLLM on a CPU: ``python -m pytest_kvcheck.engines.vllm_cpu.install [FOLDER]``.

Six to eight minutes, 3.5 GB on disk. A finished environment of the same recipe is used as it is; one that was
cut short is made anew. The last line of output is the path of its interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

# Arguments of pip, one call a line.
RECIPE = Path(__file__).with_name("recipe.txt")
MARK = "kvcheck-recipe"
PYTHONS = ((3, 11), (3, 12), (3, 13))


def recipe_hash() -> str:
    """Changes with the recipe and with the Python that would run it."""
    text = RECIPE.read_bytes() + f"python{sys.version_info[0]}.{sys.version_info[1]}".encode()
    return hashlib.sha256(text).hexdigest()[:12]


def default_folder() -> Path:
    """``$KVCHECK_CACHE/engines/vllm-0.32.0-<hash>``, by default below ``~/.cache/kvcheck``."""
    cache = os.environ.get("KVCHECK_CACHE")
    root = Path(cache) if cache else Path.home() / ".cache" / "kvcheck"
    return root / "engines" / f"vllm-0.32.0-{recipe_hash()}"


def interpreter(folder: Path) -> Path | None:
    """The interpreter of a finished environment of this recipe, or None."""
    python, mark = folder / "bin" / "python", folder / MARK
    if python.exists() and mark.exists() and mark.read_text().strip() == recipe_hash():
        return python
    return None


def install(folder: Path) -> Path:
    """Make the environment if it is not there, and return its interpreter.

    Raises ``RuntimeError`` with one paragraph where the folder holds something else or a step failed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        ready = interpreter(folder)
        if ready:
            return ready
        if folder.exists():
            if any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
                raise RuntimeError(
                    f"{folder}: expected an empty folder or an environment, found other files; name another"
                )
            shutil.rmtree(folder)
        _run([sys.executable, "-m", "venv", str(folder)])
        python = folder / "bin" / "python"
        for line in RECIPE.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                _run([str(python), "-m", "pip", *line.split()])
        (folder / MARK).write_text(recipe_hash() + "\n")
        return python


def _run(command: list[str]) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        short = " ".join(command[:5])
        raise RuntimeError(f"`{short} ...` ended with exit code {done.returncode}; its output stands above")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pytest_kvcheck.engines.vllm_cpu.install")
    parser.add_argument("folder", nargs="?", type=Path, help="where to make it (default: %(default)s)")
    parser.set_defaults(folder=default_folder())
    folder: Path = parser.parse_args().folder
    if sys.version_info[:2] not in PYTHONS:
        print(f"expected Python 3.11 to 3.13, found {sys.version.split()[0]}", file=sys.stderr)
        return 2
    try:
        print(install(folder.absolute()))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
