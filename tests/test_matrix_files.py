"""Matrix files: which there are, how a name finds one, and what a plain pytest run pays for asking."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvcheck.matrix.loader import is_matrix_file, load, resolve, shipped
from pytest_kvcheck.matrix.schema import json_schema
from pytest_kvcheck.workloads import parameter_names

ROOT = Path(__file__).parents[1]
NAMES = parameter_names()
KIT = {
    *("kv-inheritance", "logprob-concurrent", "stress-concurrent", "nth-mid-abort", "first-mid-abort"),
    *("pre-abort", "abort-leak-repro"),
}


@pytest.mark.parametrize("engine", ["reference", "sglang", "vllm"])
@pytest.mark.parametrize("name", shipped())
def test_every_shipped_matrix_loads(name: str, engine: str) -> None:
    cells = load(shipped()[name], engine=engine, device="cpu", workload_names=NAMES)  # type: ignore[arg-type]
    assert cells
    for cell in cells:
        short = any(ref.name == "abort-leak-repro" for ref in cell.workloads)
        assert (cell.features.context_length == 512) == short, (
            "over-length turns need the short context, others room"
        )
        assert (cell.features.pool_tokens or 0) >= 8192


def test_the_llama_matrix_has_the_promised_cells() -> None:
    cells = load(resolve("llama"), engine=None, device="cpu", workload_names=NAMES)
    assert [cell.name for cell in cells] == [
        *("baseline", "page-16", "page-256", "retract", "mixed-chunk", "mixed-chunk-retract"),
        *("page-256-retract", "abort-leak"),
    ]
    repro = cells[-1].features
    assert (repro.context_length, repro.page_size, repro.chunked_prefill, repro.max_running) == (
        512,
        256,
        4096,
        32,
    )
    for cell in cells[:-1]:
        assert {ref.name for ref in cell.workloads} >= KIT - {"abort-leak-repro"}
    assert [ref.name for ref in cells[-1].workloads] == ["abort-leak-repro"]


def test_what_ships() -> None:
    assert list(shipped()) == [
        *("abort", "all", "eagle_v1", "eagle_v2", "fuzz", "llama", "mixed_chunk", "page256", "retract", "swa"),
        "vllm_sessions",
    ]


def test_the_upstream_table_names_cells_that_exist() -> None:
    text = (ROOT / "docs" / "upstream.md").read_text()
    rows = re.findall(r"^\| `TestStreaming.*?\| (`[\w-]+`) \((.*?)\)", text, flags=re.MULTILINE)
    assert len(rows) == 14
    for cell, matrices in rows:
        for matrix in re.findall(r"`(\w+)`", matrices):
            names = [c.name for c in load(resolve(matrix), engine=None, device="cpu", workload_names=NAMES)]
            assert cell.strip("`") in names, (cell, matrix)


def test_resolve_prefers_files_and_suggests_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("kvcheck: 1\n")
    assert resolve("mine.yaml") == Path("mine.yaml")
    assert resolve("llama").name == "llama.yaml"
    with pytest.raises(LookupError) as error:
        resolve("lama")
    assert str(error.value) == (
        "expected a matrix file or the name of one that ships (abort, all, eagle_v1, eagle_v2, fuzz, llama, "
        "mixed_chunk, page256, retract, swa, vllm_sessions), found no file 'lama'; did you mean 'llama'?"
    )
    with pytest.raises(LookupError, match=r"found no file 'eagle-v2.yaml'; did you mean 'eagle_v2'\?"):
        resolve("eagle-v2.yaml")
    with pytest.raises(LookupError, match="found a folder"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("kvcheck: 1\n", True),
        ("\ufeff# matrix\n\n---\nkvcheck: 1\n", True),
        ("%YAML 1.2\n---\n'kvcheck' : 1\n", True),
        ("{kvcheck: 1, cells: {}}", True),
        ("version: 3\nkvcheck: 1\n", False),
        ("kvchecks: 1\n", False),
        ("services:\n  kvcheck: 1\n", False),
        ("", False),
        ("\x00\x01\x02", False),
    ],
)
def test_is_matrix_file(text: str, is_one: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(text, encoding="utf-8")
    assert is_matrix_file(path) is is_one
    assert not is_matrix_file(path.rename(tmp_path / "x.txt"))
    assert not is_matrix_file(tmp_path / "gone.yaml")


def test_asking_about_a_file_imports_neither_parser_nor_validation() -> None:
    program = (
        "import sys\nfrom pytest_kvcheck.matrix.loader import is_matrix_file, resolve\n"
        "assert is_matrix_file(resolve('llama'))\n"
        "print([name for name in ('ruamel', 'ruamel.yaml', 'pydantic', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_json_schema_knows_the_short_forms() -> None:
    schema = json_schema()
    assert schema["required"] == ["kvcheck"]
    cell = schema["$defs"]["CellForm"]
    assert cell["additionalProperties"] is False
    assert {"const": "all"} in cell["properties"]["workloads"]["anyOf"]
    assert {"type": "string"} in cell["properties"]["model"]["anyOf"]
    assert cell["properties"]["page_size"]["default"] == 1


@pytest.mark.parametrize("name", ["llama", "eagle_v1", "eagle_v2", "retract", "swa"])
def test_a_fault_that_upstream_has_mended_is_not_excused_in_later_releases(name: str) -> None:
    cells = load(resolve(name), engine="sglang", device="cpu", workload_names=NAMES)
    for cell in cells:
        spec = cell.features.speculative
        overlaps = cell.features.retract is not None and (
            spec is None or (spec.overlap and spec.version == "v2")
        )
        lost = [known for known in cell.known if known.kind == "K18"]
        assert bool(lost) == overlaps, cell.name
        for known in lost:
            assert [known.concerns(v) for v in ("0.5.12.post1", "v0.5.13", "0.5.23", "0.6.0", "", "main")] == [
                *(True, True, False, False, False, False)
            ]
        assert all(known.concerns("") for known in cell.known if known.kind != "K18")
