"""Whole runs as a user types them: attached to a server started by hand, and the line that says `again`."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_kvcheck.launch.models import ensure_model

DEADLINE = 600


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.fixture(scope="module")
def started(repository: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server as `kvcheck serve` starts it, without the sizes of a matrix; its URL and process."""
    model = ensure_model(str(repository / "fixtures" / "models" / "tiny-llama"), sys.executable)
    flags = ["--model-path", model, "--port", "0", "--enable-streaming-session", "--enable-metrics"]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest_kvcheck.cli", "serve", *flags], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        found = None
        while found is None:
            line = server.stdout.readline()
            assert line, "the server ended before it was ready"
            found = re.search(r"http://\S+", line)
        yield found[0], server
        server.send_signal(signal.SIGTERM)


def test_an_attached_server_is_judged_and_left_running(
    started: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    url, server = started
    done = run(tmp_path, "--kvcheck-matrix=llama::baseline::kv-inheritance", "--kvcheck-url", url)
    assert done.returncode == 0, done.stdout
    assert f"attached to {url}" in done.stdout
    assert "1 passed" in done.stdout
    assert "residue on reference" in done.stdout, "what was not judged of a server that is not ours"
    assert server.poll() is None


def test_a_server_that_fits_no_cell_is_no_good_run(
    started: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    url, server = started
    done = run(tmp_path, "--kvcheck-matrix=eagle_v2::eagle-v2::kv-inheritance", "--kvcheck-url", url)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    said = " ".join(done.stdout.split())
    assert "runs another configuration: speculative_algorithm: expected EAGLE" in said
    assert server.poll() is None


def test_the_line_that_runs_a_case_again_works_as_it_is_printed(tmp_path: Path) -> None:
    first = run(
        tmp_path,
        "--kvcheck-matrix=llama::baseline::kv-inheritance",
        "--kvcheck-plant=cached-tokens-off-by-one",
        "--kvcheck-python",
        sys.executable,
    )
    assert first.returncode == 1, first.stdout
    line = next(line for line in first.stdout.splitlines() if line.startswith("again: "))
    words = shlex.split(line.removeprefix("again: "))
    assert words[0] == "pytest"
    again = run(tmp_path, *words[1:])
    assert again.returncode == 1, again.stdout
    assert "1 failed" in again.stdout
    assert "llama.yaml::baseline::kv-inheritance" in again.stdout
    assert f"rootdir: {tmp_path}" in again.stdout, "no path of an option has moved pytest's root folder"
    assert "MISMATCH K19" in again.stdout
