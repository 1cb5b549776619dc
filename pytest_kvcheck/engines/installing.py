"""Makes an engine's environment from a recipe, once: a finished one of the same recipe is used as it is."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

PYTHONS = ((3, 11), (3, 12), (3, 13))
MARK = "kvcheck-recipe"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment to be. ``recipe`` holds packages, one a line; those behind ``--no-deps`` come last
    and without what they depend on. A line that starts with ``install`` or ``uninstall`` is a pip call itself.
    """

    name: str
    recipe: Path

    def digest(self) -> str:
        """Changes with the recipe and with the Python that would run it."""
        text = self.recipe.read_bytes() + f"python{sys.version_info[0]}.{sys.version_info[1]}".encode()
        return hashlib.sha256(text).hexdigest()[:12]

    def default_folder(self) -> Path:
        """``$KVCHECK_CACHE/engines/<name>-<digest>``, by default below ``~/.cache/kvcheck``."""
        cache = os.environ.get("KVCHECK_CACHE")
        root = Path(cache) if cache else Path.home() / ".cache" / "kvcheck"
        return root / "engines" / f"{self.name}-{self.digest()}"

    def interpreter(self, folder: Path) -> Path | None:
        """The interpreter of a finished environment of this recipe, or None."""
        python, mark = folder / "bin" / "python", folder / MARK
        if python.exists() and mark.exists() and mark.read_text().strip() == self.digest():
            return python
        return None

    def install(self, folder: Path) -> Path:
        """Make the environment if it is not there, and return its interpreter.

        Raises ``RuntimeError`` with one paragraph where the folder holds something else or a step failed.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            ready = self.interpreter(folder)
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
            for arguments in self.pip_calls():
                _run([str(python), "-m", "pip", *arguments])
            (folder / MARK).write_text(self.digest() + "\n")
            return python

    def pip_calls(self) -> list[list[str]]:
        """The recipe as arguments of pip, one list a call."""
        text = self.recipe.read_text(encoding="utf-8").splitlines()
        lines = [line.strip() for line in text if line.strip() and not line.startswith("#")]
        calls = [line.split() for line in lines if line.startswith(("install ", "uninstall "))]
        packages = [line for line in lines if not line.startswith(("install ", "uninstall "))]
        alone = [line.removeprefix("--no-deps ") for line in packages if line.startswith("--no-deps ")]
        others = [line for line in packages if not line.startswith("--no-deps ")]
        if others:
            calls.append(["install", *others])
        if alone:
            calls.append(["install", "--no-deps", *alone])
        return calls

    def main(self, module: str) -> int:
        """The command ``python -m module [FOLDER]``; its last line of output is the interpreter's path."""
        parser = argparse.ArgumentParser(prog=f"python -m {module}")
        parser.add_argument("folder", nargs="?", type=Path, help="where to make it (default: %(default)s)")
        parser.set_defaults(folder=self.default_folder())
        folder: Path = parser.parse_args().folder
        if sys.version_info[:2] not in PYTHONS:
            print(f"expected Python 3.11 to 3.13, found {sys.version.split()[0]}", file=sys.stderr)
            return 2
        try:
            print(self.install(folder.absolute()))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        return 0


def _run(command: list[str]) -> None:
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        short = " ".join(command[:5])
        raise RuntimeError(f"`{short} ...` ended with exit code {done.returncode}; its output stands above")
