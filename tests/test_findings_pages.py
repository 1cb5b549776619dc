"""The pages of docs/findings: the index is whole, programs compile, and say so where there is no server."""

from __future__ import annotations

import re
import runpy
import socket
from pathlib import Path

import pytest

from pytest_kvcheck.cells import Cell, EngineName
from pytest_kvcheck.matrix.loader import load
from pytest_kvcheck.workloads import parameter_names

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "findings"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
LAUNCHER = "again.py"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.name != LAUNCHER)
AGAIN = re.compile(rf"^python docs/findings/{LAUNCHER} (\S+)((?: \w+\.py)+)", re.M)


def test_the_index_names_every_page_once() -> None:
    linked = re.findall(r"\]\((\S+\.md)\) \|$", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(linked) == [path.name for path in PAGES]


def test_every_program_has_a_page_and_every_page_s_programs_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"\b\w+\.py\b", page.read_text())}
    assert {path.name for path in PROGRAMS} <= named
    missing = {
        name for name in named if name.startswith(("sglang_", "vllm_")) and not (FOLDER / name).is_file()
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_s_links_and_servers_are_there(page: Path) -> None:
    text = page.read_text()
    assert "**Verdict" in text
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / target).exists(), target
    cells = {cell.name for cell in _servers("sglang")}
    for cell, programs in AGAIN.findall(text):
        assert cell in cells
        assert all((FOLDER / name).is_file() for name in programs.split())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_servers_are_a_matrix(engine: EngineName) -> None:
    assert any(cell.name.startswith("vllm") for cell in _servers(engine))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_says_that_there_is_no_server(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # ours, and nobody listens there
        monkeypatch.setattr("sys.argv", [str(program), f"http://127.0.0.1:{bound.getsockname()[1]}"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().out.startswith("no server at http://127.0.0.1:")


def _servers(engine: EngineName) -> list[Cell]:
    return load(FOLDER / "servers.yaml", engine=engine, device="cpu", workload_names=parameter_names())
