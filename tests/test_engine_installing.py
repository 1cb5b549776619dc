"""Making the environment of an engine, without making one: pip is played by the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_kvcheck.engines import installing
from pytest_kvcheck.engines.installing import Environment
from pytest_kvcheck.engines.sglang_cpu.install import ENVIRONMENT
from pytest_kvcheck.engines.vllm_cpu.install import ENVIRONMENT as VLLM


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; making a venv leaves the files that one has."""
    ran: list[list[str]] = []

    def run(command: list[str]) -> None:
        ran.append(command)
        if "venv" in command:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").touch()
            (folder / "pyvenv.cfg").touch()

    monkeypatch.setattr(installing, "_run", run)
    return ran


def test_an_environment_is_made_by_the_recipe(tmp_path: Path, commands: list[list[str]]) -> None:
    python = ENVIRONMENT.install(tmp_path / "env")
    assert python == tmp_path / "env" / "bin" / "python"
    make, with_deps, without = commands
    assert make[1:3] == ["-m", "venv"]
    assert "torch==2.13.0" in with_deps
    assert without[-3:] == ["--no-deps", "sglang==0.5.23", "torchvision==0.28.0"]
    assert all("==" in package for package in (*with_deps[4:], *without[5:])), "every version is pinned"


def test_a_line_of_the_recipe_may_be_a_pip_call_of_its_own() -> None:
    torch, vllm, away = VLLM.pip_calls()
    assert torch == ["install", "torch==2.13.0"]
    assert vllm[:2] == ["install", "torch==2.13.0"]
    assert away[:2] == ["uninstall", "-y"]


def test_a_finished_environment_is_used_again(tmp_path: Path, commands: list[list[str]]) -> None:
    first = ENVIRONMENT.install(tmp_path / "env")
    commands.clear()
    assert ENVIRONMENT.install(tmp_path / "env") == first
    assert commands == []


def test_an_environment_that_was_cut_short_is_made_anew(tmp_path: Path, commands: list[list[str]]) -> None:
    ENVIRONMENT.install(tmp_path / "env")
    (tmp_path / "env" / "kvcheck-recipe").unlink()
    commands.clear()
    ENVIRONMENT.install(tmp_path / "env")
    assert len(commands) == 3


def test_an_environment_of_another_recipe_is_made_anew(tmp_path: Path, commands: list[list[str]]) -> None:
    ENVIRONMENT.install(tmp_path / "env")
    (tmp_path / "env" / "kvcheck-recipe").write_text("another\n")
    assert ENVIRONMENT.interpreter(tmp_path / "env") is None
    ENVIRONMENT.install(tmp_path / "env")
    assert ENVIRONMENT.interpreter(tmp_path / "env")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RuntimeError, match="expected an empty folder or an environment"):
        ENVIRONMENT.install(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    assert commands == []


def test_the_folder_is_keyed_by_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCHECK_CACHE", str(tmp_path))
    folder = ENVIRONMENT.default_folder()
    assert folder == tmp_path / "engines" / f"sglang-0.5.23-{ENVIRONMENT.digest()}"
    other = tmp_path / "recipe.txt"
    other.write_text("torch==0\n")
    assert Environment("sglang-0.5.23", other).default_folder() != folder


def test_the_last_line_is_the_interpreter(
    tmp_path: Path,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["install", str(tmp_path / "env")])
    assert ENVIRONMENT.main("install") == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "env" / "bin" / "python")


def test_a_step_that_fails_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["install", str(tmp_path / "env")])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert ENVIRONMENT.main("install") == 1
    assert "ended with exit code 1" in capfd.readouterr().err
    assert ENVIRONMENT.interpreter(tmp_path / "env") is None
