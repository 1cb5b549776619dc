"""vLLM's account: gauges, golden lists, and the leak probe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers import METRICS, FakeVllm, answers, cell, metrics

from pytest_kvcheck.cells import Retract
from pytest_kvcheck.client.control import Answer
from pytest_kvcheck.engines import vllm_gauges, vllm_versions
from pytest_kvcheck.engines.vllm import LOG_RULES, VllmEngine
from pytest_kvcheck.engines.vllm_cpu import install
from pytest_kvcheck.observe.logs import match_line

REFUSED = Answer(200, json.dumps({"success": False}))
WARNING = "Failed to reset prefix cache because some blocks (3) are not freed yet"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_gauges, "SETTLE", 0.05)
    monkeypatch.setattr(vllm_gauges, "POLL", 0.01)


def test_a_reading_has_the_pool_in_tokens() -> None:
    sample = VllmEngine().sample(
        FakeVllm(answers(metrics(used=6 / 64, running=2, waiting=1, preempted=13))), 1.5
    )
    pool = sample.pool("full")
    assert pool is not None
    assert (pool.total, pool.used) == (64 * 32, 6 * 32)
    assert (sample.running, sample.waiting, sample.retracted_total) == (2, 1, 13)
    assert sample.missing == []
    assert sample.error == ""


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.32.0", "0.40.1", ""])
def test_every_name_of_a_golden_list_is_missed(version: str) -> None:
    names = vllm_versions.golden_gauges(version)
    assert "kv_cache_usage_perc" in names
    for name in names:
        renamed = METRICS.replace(f"vllm:{name}", "vllm:renamed")
        assert vllm_gauges.sample(FakeVllm(answers(renamed)), 0.0, names).missing == [f"vllm:{name}"]


def test_the_lists_of_two_releases_are_there() -> None:
    assert {(0, 10, 2), (0, 32, 0)} <= set(vllm_versions._golden_lists())


@pytest.mark.parametrize(
    "answer",
    [
        Answer(None, error="ConnectionError: refused"),
        Answer(500, "no"),
        Answer(200, "vllm:num_requests_running{ x"),
    ],
)
def test_a_server_that_answers_nonsense_is_an_error_not_an_exception(answer: Answer) -> None:
    sample = VllmEngine().account(FakeVllm(lambda method, path: answer), 0.0, [])
    assert sample.error.startswith("GET /metrics")


def test_at_rest_the_probe_is_asked_after_the_gauges() -> None:
    server = FakeVllm(answers(metrics()))
    sample = VllmEngine().account(server, 0.0, [])
    assert sample.source == "metrics, reset_prefix_cache succeeded"
    assert server.asked == ["GET /metrics", "POST /reset_prefix_cache"]


def test_a_leak_is_the_count_that_the_gauge_tells() -> None:
    server = FakeVllm(answers(metrics(used=4 / 64), REFUSED))
    sample = VllmEngine().account(server, 0.0, [])
    assert [pool.used for pool in sample.pools] == [4 * 32]
    assert sample.source == "metrics, reset_prefix_cache refused"
    assert server.asked.count("POST /reset_prefix_cache") == 1, "each refusal writes a line into the log"


def test_a_refusal_outweighs_a_gauge_that_says_zero() -> None:
    sample = VllmEngine().account(FakeVllm(answers(metrics(), REFUSED)), 0.0, [])
    assert [pool.used for pool in sample.pools] == [32]


def test_a_refusal_that_passes_is_no_leak() -> None:
    left = [REFUSED, REFUSED]
    good = Answer(200, json.dumps({"success": True}))
    server = FakeVllm(
        lambda method, path: Answer(200, metrics()) if path == "/metrics" else left.pop() if left else good
    )
    sample = VllmEngine().account(server, 0.0, [])
    assert [pool.used for pool in sample.pools] == [0]
    assert sample.source == "metrics, reset_prefix_cache succeeded"


def test_frees_that_lag_behind_are_waited_for() -> None:
    texts = [metrics(used=4 / 64), metrics(used=2 / 64, running=1)]
    server = FakeVllm(
        lambda method, path: (
            Answer(200, texts.pop(0) if texts else metrics())
            if path == "/metrics"
            else Answer(200, '{"success":true}')
        )
    )
    assert [pool.used for pool in VllmEngine().account(server, 0.0, []).pools] == [0]


def test_a_busy_server_is_not_probed() -> None:
    server = FakeVllm(answers(metrics(used=4 / 64, running=1)))
    sample = VllmEngine().account(server, 0.0, [])
    assert sample.running == 1
    assert not any("reset" in path for path in server.asked), "a refusal would look like a leak in the log"


def test_a_dead_engine_core_behind_a_server_that_lives_is_an_error() -> None:
    dead = Answer(500, '{"error":{"message":"EngineCore encountered an issue."}}')
    sample = VllmEngine().account(FakeVllm(answers(metrics(), dead)), 0.0, [])
    assert "engine core" in sample.error


def test_without_development_mode_the_gauges_stand_alone() -> None:
    sample = VllmEngine().account(FakeVllm(answers(metrics(), Answer(404, "{}"))), 0.0, [])
    assert sample.source == "metrics"
    assert sample.error == ""


def test_a_retract_cell_has_what_runs_preempted() -> None:
    call = VllmEngine().provoke_call(cell(retract=Retract()))
    assert call is not None
    assert call.path == "/reset_prefix_cache?reset_running_requests=true"
    assert VllmEngine().provoke_call(cell()) is None


# --- log -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "rule", "meaning"),
    [
        (
            f"(EngineCore pid=7) WARNING 12-02 00:00:00 [block_pool.py:812] {WARNING}",
            "blocks-not-freed",
            "warning",
        ),
        ("ERROR [core.py:1512] EngineCore encountered a fatal error.", "engine-core-died", "fatal"),
        ("ERROR [core.py:1512]     assert block.ref_cnt == 0", "block-pool-inconsistent", "leak"),
        (
            "ERROR [x.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting",
            "worker-died",
            "fatal",
        ),
        ("INFO Engine 000: Running: 2 reqs, Preemptions: 5, Prefix cache hit", "preemptions", "retract"),
    ],
)
def test_lines_that_matter_are_found(text: str, rule: str, meaning: str) -> None:
    events = match_line(LOG_RULES, text, 1, 0.0)
    assert [(event.rule, event.meaning) for event in events] == [(rule, meaning)]


def test_the_count_of_a_refusal_is_a_field() -> None:
    assert match_line(LOG_RULES, WARNING, 1, 0.0)[0].fields == {"blocks": 3}


@pytest.mark.parametrize(
    "text",
    [
        "nanobind: leaked 514 functions!",
        "INFO [shutdown] EngineCore: exiting busy loop",
        "Successfully reset prefix cache",
        "resource_tracker: There appear to be 2 leaked shared_memory objects to clean up at shutdown",
    ],
)
def test_harmless_lines_are_not(text: str) -> None:
    assert match_line(LOG_RULES, text, 1, 0.0) == []


# --- start-up patch ------------------------------------------------------------------------------
def patched(tmp_path: Path, old: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "victim.py").write_text("VALUE = 1\nOTHER = 1\n")
    inject = Path(install.__file__).with_name("inject")
    changes = json.dumps([{"module": "victim", "old": old, "new": "VALUE = 2"}])
    env = {"PYTHONPATH": f"{inject}:{tmp_path}", "KVCHECK_VLLM_PATCH": changes, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", "import victim; print(victim.VALUE)"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_patch_changes_the_text_of_a_module(tmp_path: Path) -> None:
    assert patched(tmp_path, "VALUE = 1").stdout.strip() == "2"


@pytest.mark.parametrize("old", ["VALUE = 3", " = 1"])
def test_a_patch_that_does_not_fit_stops_the_start(tmp_path: Path, old: str) -> None:
    done = patched(tmp_path, old)
    assert done.returncode != 0
    assert "expected exactly once" in done.stderr
