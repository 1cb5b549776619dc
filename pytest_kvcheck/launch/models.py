"""Model folders that a server can load: given ones as they are, synthetic ones made on first use and kept.

A synthetic model is a folder with a ``recipe.json``. Its weights are made by ``reference/synthetic.py`` under
the engine's interpreter, since the plugin's own environment needs no torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

_MAKER = Path(__file__).resolve().parent.parent / "reference" / "synthetic.py"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_MAKE_DEADLINE = 300.0
# A hub id has one slash and nothing that only paths have ("meta-llama/Llama-3.1-8B"); a first part that is a
# folder here is taken as a path, so that a mistyped folder is not looked up on the hub.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_dir() -> Path:
    """``$KVCHECK_CACHE/models``, else ``$XDG_CACHE_HOME/kvcheck/models``, else ``~/.cache/kvcheck/models``."""
    own = os.environ.get("KVCHECK_CACHE")
    if own:
        return Path(own).expanduser() / "models"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvcheck" / "models"


def ensure_model(path: str, python: str) -> str:
    """A folder with weights, or a hub id, that a server can be given for ``path``.

    Raises ``LookupError`` (one paragraph) where ``path`` is nothing of the kind, or where it is a recipe and
    neither ``python`` nor this interpreter can make it.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if _is_hub_id(path):
            return path
        raise LookupError(_missing(path, folder))
    if folder.is_file():
        raise LookupError(
            f"model {path!r} is a file; expected the folder that holds config.json or recipe.json."
        )
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        return str(folder.resolve())
    if not (folder / "recipe.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise LookupError(
            f"model folder {folder} holds neither weights ({', '.join(_WEIGHTS)}) nor a recipe.json; "
            f"found {found}. Name a folder in Hugging Face layout, one with a kvcheck recipe, or a hub id such "
            "as owner/name."
        )
    return str(_made(folder.resolve(), python))


def vocab_size_of(folder: str) -> int | None:
    """The vocabulary size in ``config.json`` or ``recipe.json`` of a model folder; None where neither tells."""
    for name in ("config.json", "recipe.json"):
        try:
            config = json.loads((Path(folder).expanduser() / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for part in (
            (config, config.get("config"), config.get("text_config")) if isinstance(config, dict) else ()
        ):
            size = part.get("vocab_size") if isinstance(part, dict) else None
            if isinstance(size, int):
                return size
    return None


def _is_hub_id(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is not None and not Path(path).parent.is_dir()


def _missing(path: str, folder: Path) -> str:
    parent = folder.parent
    while not parent.is_dir():
        parent = parent.parent
    wanted = folder.relative_to(parent).parts[0]
    there = sorted(p.name for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    near = difflib.get_close_matches(wanted, there, n=1, cutoff=0.5)
    hint = (
        f"did you mean {parent / near[0]}?"
        if near
        else f"{parent} holds the folders {', '.join(there[:8]) or '(none)'}."
    )
    return f"model {path!r} does not exist: there is no {wanted!r} in {parent.resolve()}; {hint}"


def _made(recipe_dir: Path, python: str) -> Path:
    """The cache folder with the model of a recipe, made under a lock: xdist workers ask for it at once."""
    out = cache_dir() / f"{recipe_dir.name}-{_fingerprint(recipe_dir)}"
    weights = out / "model.safetensors"
    if not weights.is_file():
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{out}.lock"):
                if not weights.is_file():
                    _make(recipe_dir, out, python)
        except OSError as error:
            raise LookupError(
                f"cannot keep the synthetic model {recipe_dir.name} in {out.parent}: {error.strerror}. "
                "Set KVCHECK_CACHE to a folder that can be written."
            ) from None
    return out


def _fingerprint(recipe_dir: Path) -> str:
    """Changes with the recipe, its target's recipe and the maker, so that a stale model is never used."""
    digest = hashlib.sha256(_MAKER.read_bytes())
    content = (recipe_dir / "recipe.json").read_bytes()
    digest.update(content)
    try:
        target = json.loads(content).get("target")
        if target:
            digest.update((recipe_dir / target / "recipe.json").read_bytes())
    except (AttributeError, ValueError, TypeError, OSError):
        pass  # not a recipe, or its target is gone: the maker says so in words
    return digest.hexdigest()[:12]


def _make(recipe_dir: Path, out: Path, python: str) -> None:
    lacking = []
    for interpreter in dict.fromkeys((python, sys.executable)):
        lack = _lacks_torch(interpreter)
        if lack:
            lacking.append(f"{interpreter} ({lack})")
            continue
        argv = [interpreter, str(_MAKER), str(recipe_dir), str(out)]
        env = os.environ | {"PYTHONSAFEPATH": "1"}  # its own folder holds modules that must not shadow others
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_MAKE_DEADLINE, env=env)
        except subprocess.TimeoutExpired:
            raise LookupError(
                f"making the synthetic model took over {_MAKE_DEADLINE:.0f} s: {' '.join(argv)}"
            ) from None
        if done.returncode:
            raise LookupError(
                f"cannot make the synthetic model {recipe_dir.name}: "
                f"{done.stderr.strip()[-600:] or 'no message'} "
                f"(exit {done.returncode}; command: {' '.join(argv)})"
            )
        return
    raise LookupError(
        f"the synthetic model {recipe_dir} is made on first use, which needs torch and safetensors, and no "
        f"interpreter at hand has both: {'; '.join(lacking)}. Install them there "
        "(pip install 'pytest-kvcheck[reference]'), or name the interpreter of the engine's environment with "
        "--kvcheck-python."
    )


def _lacks_torch(python: str) -> str | None:
    """Why ``python`` cannot run the maker, or None. Finds the modules without importing them: torch is slow."""
    probe = "import importlib.util as u; print(*[m for m in ('torch', 'safetensors') if not u.find_spec(m)])"
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    if done.returncode:
        return f"does not run: {done.stderr.strip()[-200:]}"
    missing = done.stdout.split()
    return f"has no {' and no '.join(missing)}" if missing else None
