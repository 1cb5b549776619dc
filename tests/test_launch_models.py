"""Model folders: given ones are taken as they are, synthetic ones made once; a failure is one paragraph."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import safe_open

from pytest_kvcheck.launch import models
from pytest_kvcheck.launch.models import cache_dir, ensure_model, vocab_size_of

RECIPES = Path(__file__).parent.parent / "fixtures" / "models"
LLAMA = str(RECIPES / "tiny-llama")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCHECK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def without_torch(folder: Path) -> str:
    """An interpreter that finds no torch: this one, isolated from its packages."""
    script = folder / "python-without-torch"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_recipe_is_made_once_and_found_again(cache: Path) -> None:
    made = ensure_model(LLAMA, sys.executable)
    weights = Path(made) / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    assert ensure_model(LLAMA + "/", sys.executable) == made
    assert weights.stat().st_mtime_ns == stamp
    assert Path(made).parent == cache
    assert Path(made).name.startswith("tiny-llama-")
    assert vocab_size_of(made) == 512
    with safe_open(str(weights), "pt") as tensors:
        assert "lm_head.weight" in tensors.keys()  # noqa: SIM118 - it is no mapping


def test_workers_that_race_get_one_model(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: ensure_model(LLAMA, sys.executable), range(4)))
    assert len(made) == 1
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} == {Path(made.pop()).name}


def test_another_recipe_or_another_target_is_another_model(cache: Path, tmp_path: Path) -> None:
    for name in ("tiny-llama", "tiny-llama-eagle"):
        shutil.copytree(RECIPES / name, tmp_path / "models" / name)
    draft = str(tmp_path / "models" / "tiny-llama-eagle")
    first = ensure_model(draft, sys.executable)
    target = tmp_path / "models" / "tiny-llama" / "recipe.json"
    target.write_text(json.dumps(json.loads(target.read_text()) | {"seed": 7}))
    assert ensure_model(draft, sys.executable) != first


def test_this_interpreter_makes_it_where_the_engines_has_no_torch(cache: Path, tmp_path: Path) -> None:
    assert Path(ensure_model(LLAMA, without_torch(tmp_path))).is_dir()


def test_no_interpreter_with_torch(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = without_torch(tmp_path)
    monkeypatch.setattr(models.sys, "executable", "/nowhere/python")
    with pytest.raises(LookupError) as caught:
        ensure_model(LLAMA, bare)
    message = str(caught.value)
    assert f"{bare} (has no torch and no safetensors)" in message
    assert "/nowhere/python (does not run" in message
    assert "pip install 'pytest-kvcheck[reference]'" in message
    assert "\n" not in message


def test_weights_and_hub_ids_are_returned_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert ensure_model(str(tmp_path), "/nowhere/python") == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert ensure_model(f"~/{tmp_path.name}", "/nowhere/python") == str(tmp_path)
    assert ensure_model("meta-llama/Llama-3.1-8B", "/nowhere/python") == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (str(RECIPES / "tiny-lama"), f"did you mean {RECIPES / 'tiny-llama'}?"),
        (str(RECIPES / "tiny-llama" / "x" / "y"), "there is no 'x' in"),
        (str(RECIPES / "tiny-llama" / "recipe.json"), "is a file; expected the folder"),
        (str(RECIPES), "neither weights"),
        ("qwen", "does not exist"),
    ],
)
def test_what_is_no_model_is_refused_with_the_way_out(given: str, said: str) -> None:
    with pytest.raises(LookupError) as caught:
        ensure_model(given, sys.executable)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_recipe_is_named(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"kind": "target"}')
    with pytest.raises(
        LookupError, match="is not a recipe: expected an object with config, kind, scales, seed"
    ):
        ensure_model(str(tmp_path), sys.executable)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCHECK_CACHE", str(tmp_path / "file"))
    with pytest.raises(LookupError, match="Set KVCHECK_CACHE to a folder that can be written"):
        ensure_model(LLAMA, sys.executable)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCHECK_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache_dir() == Path("/var/xdg/kvcheck/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/home/me/.cache/kvcheck/models")
    monkeypatch.setenv("KVCHECK_CACHE", "~/kv")
    assert cache_dir() == Path("/home/me/kv/models")


def test_vocabulary_size(tmp_path: Path) -> None:
    assert vocab_size_of(LLAMA) == 512
    assert vocab_size_of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 99}}')
    assert vocab_size_of(str(tmp_path)) == 99
    (tmp_path / "config.json").write_text("[]")
    assert vocab_size_of(str(tmp_path)) is None
