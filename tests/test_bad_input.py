"""What a user may get wrong ends in one clear paragraph; the other cases go on, and nothing is lost."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GOOD = """\
kvcheck: 1
family: good
model: {path: MODEL}
defaults: {context_length: 1024, pool_tokens: 4096, max_running: 4}
cells: {plain: {}}
workloads: [kv-inheritance]
"""


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run pytest there; returns what it said and the cases of its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--kvcheck-json", "out.json", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    path = folder / "out.json"
    return done, json.loads(path.read_text())["cases"] if path.exists() else []


@pytest.fixture
def good(tmp_path: Path, repository: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD.replace("MODEL", str(repository / "fixtures" / "models" / "tiny-llama")))
    return path


def test_a_bad_matrix_does_not_cost_the_good_one(tmp_path: Path, good: Path) -> None:
    tmp_path.joinpath("bad.yaml").write_text("kvcheck: 1\nfamily: bad\nmodel: {path: x}\ncels: {}\n")
    done, cases = run(tmp_path, "bad.yaml", "good.yaml")
    outcomes = {case["id"]: case["outcome"] for case in cases}
    assert outcomes == {"bad.yaml": "error", "good.yaml::plain::kv-inheritance": "passed"}, done.stdout
    assert "bad.yaml:4:1" in done.stdout
    assert "did you mean 'cells'" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_missing_model_is_named(tmp_path: Path, good: Path) -> None:
    good.write_text(good.read_text().replace("tiny-llama", "tiny-lama"))
    done, cases = run(tmp_path, "good.yaml")
    assert [case["outcome"] for case in cases] == ["error"]
    assert "tiny-lama" in cases[0]["reason"]
    assert "tiny-llama" in cases[0]["reason"], "the nearest folder is suggested"
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kvcheck-python", "/nowhere/python"), "/nowhere/python"),
        (("--kvcheck-engine", "sglang"), "sglang"),
        (("--kvcheck-engine", "vllm"), "vllm"),
    ],
)
def test_an_engine_that_cannot_start_is_one_paragraph(
    options: tuple[str, ...], words: str, tmp_path: Path, good: Path
) -> None:
    if words == "vllm":
        good.write_text(good.read_text().replace("cells: {plain: {}}", "cells: {plain: {page_size: 32}}"))
    done, cases = run(tmp_path, "good.yaml", *options)
    assert done.returncode == 1, done.stdout
    assert [case["outcome"] for case in cases] == ["error"], done.stdout
    assert words in cases[0]["reason"]
    assert "Traceback" not in done.stdout


def test_usage_errors_name_the_option(tmp_path: Path, good: Path) -> None:
    for option, value in (("--kvcheck-shard", "5/4"), ("--kvcheck-budget", "soon"), ("--kvcheck-repeat", "0")):
        done, _ = run(tmp_path, "good.yaml", option, value)
        assert done.returncode == 4, (option, done.stdout, done.stderr)
        assert option in done.stderr
        assert "Traceback" not in done.stderr
    done, _ = run(tmp_path, "--kvcheck-matrix", "lama")
    assert done.returncode == 4
    assert "llama" in done.stderr


class _Garbage(http.server.BaseHTTPRequestHandler):
    """Answers everything with 200 and no JSON: a web server that is no inference server."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def garbage() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Garbage)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_attaching_to_something_else_says_what_it_found(tmp_path: Path, good: Path, garbage: str) -> None:
    done, cases = run(tmp_path, "good.yaml", "--kvcheck-url", garbage)
    assert [case["outcome"] for case in cases] == ["error"], done.stdout
    assert garbage in cases[0]["reason"]
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kvcheck-url", "http://192.0.2.1:30000"], "expected a server on this machine"),
        (["--kvcheck-url", "127.0.0.1:30000"], "expected http://127.0.0.1:PORT"),
        (["--kvcheck-url", "http://127.0.0.1:30000/v1"], "leave out '/v1'"),
        (["--kvcheck-plant", "lock-never-relesed"], "did you mean 'lock-never-released'?"),
        (["--kvcheck-plant", "no-such-fault"], "`kvcheck faults` lists them"),
        (["--kvcheck-plant", "double-free", "--kvcheck-engine", "vllm"], "only the reference engine"),
        (["--kvcheck-plant", "double-free", "--kvcheck-url", "http://127.0.0.1:1"], "kvcheck serve --plant"),
    ],
)
def test_what_can_be_known_at_once_starts_nothing(
    options: list[str], words: str, tmp_path: Path, good: Path
) -> None:
    done, cases = run(tmp_path, "good.yaml", *options)
    assert (done.returncode, cases) == (4, []), done.stdout
    assert words in done.stderr
    assert options[0] in done.stderr


@pytest.mark.parametrize("option", ["artifacts", "report", "json"])
def test_a_place_that_cannot_be_written_to_is_known_before_the_run(
    option: str, tmp_path: Path, good: Path
) -> None:
    tmp_path.joinpath("file").write_text("")
    done, _ = run(tmp_path, "good.yaml", f"--kvcheck-{option}", "file/below/x")
    assert done.returncode == 4, done.stdout
    assert f"--kvcheck-{option}: expected a folder to write to, found not a directory" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_file_that_is_no_matrix_is_named(tmp_path: Path) -> None:
    tmp_path.joinpath("other.yaml").write_text("family: x\n")
    done, _ = run(tmp_path, "other.yaml")
    assert done.returncode == 4, done.stdout
    assert "other.yaml is no matrix: its first key is not `kvcheck`" in done.stdout
    done, _ = run(tmp_path, "--kvcheck-matrix", "other.yaml")
    assert done.returncode == 4, done.stdout
    assert "--kvcheck-matrix: expected a matrix" in done.stderr


def test_a_fault_for_an_engine_that_takes_none_is_refused(tmp_path: Path, good: Path) -> None:
    good.write_text(good.read_text().replace("family: good\n", "family: good\nengine: sglang\n"))
    done, cases = run(tmp_path, "good.yaml", "--kvcheck-plant", "double-free")
    assert [case["outcome"] for case in cases] == ["error"], done.stdout
    assert "good.yaml:" in cases[0]["reason"]
    assert "--kvcheck-engine reference" in cases[0]["reason"]
