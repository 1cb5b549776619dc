"""The fixtures for people who write their own tests, on the real reference engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvcheck.fixtures import assert_logprobs_match
from pytest_kvcheck.trace import Reply

TEST = """
import pytest
from pytest_kvcheck.fixtures import assert_logprobs_match

@pytest.mark.kvcheck(matrix="llama", cells=["baseline"])
def test_sessions_give_everything_back(kv_server, kv_client, kv_ledger):
    assert kv_server.engine == "reference"
    with kv_ledger.expect_no_leak():
        with kv_client.open_session() as session:
            first = session.turn(range(20, 60), max_new_tokens=6)
            second = session.turn([7, 8, 9], max_new_tokens=6)
        history = [*range(20, 60), *first.output_ids, 7, 8, 9]
        assert second.prompt_tokens == len(history)
        assert_logprobs_match(second, kv_client.generate(history, max_new_tokens=6))

@pytest.mark.kvcheck(matrix="llama", cells=["baseline"])
def test_an_open_session_is_named(kv_client, kv_ledger):
    with pytest.raises(AssertionError, match="found s1 open"):
        with kv_ledger.expect_no_leak():
            session = kv_client.open_session()
    session.close()
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder.joinpath("test_own.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_clean_server_passes_and_is_stopped(tmp_path: Path) -> None:
    done = run(tmp_path, TEST)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_planted_leak_fails_inside_the_block(tmp_path: Path) -> None:
    done = run(
        tmp_path, TEST, "--kvcheck-plant", "lock-never-released", "--kvcheck-silent", "-k", "gives or give"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "LEAK K10" in done.stdout or "LEAK K01" in done.stdout
    assert "not given back" in done.stdout


def test_an_unknown_cell_is_a_usage_error(tmp_path: Path) -> None:
    done = run(tmp_path, TEST.replace('cells=["baseline"]', 'cells=["baselin"]'))
    assert "expected cells among" in done.stdout + done.stderr
    assert "found 'baselin'" in done.stdout + done.stderr


def test_logprobs_that_part_are_named() -> None:
    one = Reply(output_ids=[4, 5], output_logprobs=[-0.5, -0.25])
    assert_logprobs_match(one, Reply(output_ids=[4, 5], output_logprobs=[-0.5, -0.27]))
    with pytest.raises(AssertionError, match="part at position 1"):
        assert_logprobs_match(one, Reply(output_ids=[4, 5], output_logprobs=[-0.5, -0.35]))
    with pytest.raises(AssertionError, match="part at position 1"):
        assert_logprobs_match(one, Reply(output_ids=[4, 5], output_logprobs=[-0.5, float("nan")]))
    with pytest.raises(AssertionError, match="ids part at position 1"):
        assert_logprobs_match(one, Reply(output_ids=[4, 6], output_logprobs=[-0.5, -0.25]))
