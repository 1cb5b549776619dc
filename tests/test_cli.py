"""The ``kvcheck`` command: help that is whole, results that are said, and bad usage in one clear line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_kvcheck.cells import Cell, Features, Model, Position
from pytest_kvcheck.cli import main
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.shrink.commands import told
from pytest_kvcheck.shrink.minimise import Minimised, Rate
from tests.report_helpers import leak


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models", "--help"], ("make", "list", "safetensors", "Print the names")),
        (["models", "make", "--help"], ("DIR", "--only NAME", "may be repeated")),
        (["report", "--help"], ("an artifacts folder, or a --kvcheck-json file", "default: kvcheck.html")),
        (["merge", "--help"], ("artifacts folders", "default: kvcheck.json")),
        (["doctor", "--help"], ("--python PATH",)),
        (["shrink", "--help"], ("--url URL", "a trace.jsonl, or the folder that holds it")),
    ],
)
def test_help_says_what_each_thing_is(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    text = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "nowhere"], "expected a trace.jsonl or the folder that holds one, found none at nowhere"),
        (["shrink", "."], "found none at trace.jsonl"),
        (["report", "nowhere"], "found none at nowhere"),
        (["merge", "nowhere"], "found none at nowhere"),
        (["models", "make", "x", "--only", "tiny"], "expected one of tiny-llama"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvcheck {arguments[0]}: ")
    assert words in said
    assert "Errno" not in said
    assert len(said.splitlines()) == 1


def test_a_report_that_cannot_be_written_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "result.json").write_text('{"schema": 1, "cases": []}')
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "file" / "x.html")]) == 2
    assert f"kvcheck report: {tmp_path / 'file'}: " in capsys.readouterr().err


def test_doctor_tells_a_missing_interpreter_from_a_missing_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--python", "/nowhere/python"]) == 2
    here, there = capsys.readouterr().out.split("/nowhere/python", 1)
    assert sys.executable in here
    assert "checks and gauges: " in here
    assert "expected an interpreter such as /path/to/venv/bin/python, found no such file" in there
    assert "sglang" not in there


def test_shrink_says_what_became_of_it(tmp_path: Path) -> None:
    plan = Plan(workload="w", operations=(Operation(id=1, kind="generate"),), seed=1)
    cell = Cell("c", "f", "reference", Model("m"), Features(), Position("m.yaml", 1, 1))
    made = Minimised(
        plan, cell, leak(), Rate(3, 3), Rate(4, 5), operations_before=96, probes=41, seconds=125.0,
        exhausted=True, steps=[],
    )  # fmt: skip
    lines = told(made, tmp_path).splitlines()
    assert lines[0] == (
        "result: 1 of 96 operation is left after 41 probes in 2 min 5 s; the budget ended the search, a longer "
        "one may find less"
    )
    assert lines[1].startswith("the whole plan failed in 3 of 3 runs")
    assert "what is left in 4 of 5 runs" in lines[1]
    assert f"program: {tmp_path / 'repro.py'}" in lines
    assert f"issue:   {tmp_path / 'issue.md'}" in lines
