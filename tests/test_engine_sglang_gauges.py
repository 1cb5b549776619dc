"""SGLang's account: what each source says, what is stale, what is missing."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_helpers import GOLDEN, FakeControl, cell, loads

from pytest_kvcheck.client.control import Answer
from pytest_kvcheck.engines import make_engine, sglang_gauges
from pytest_kvcheck.engines.sglang import SglangEngine
from pytest_kvcheck.engines.sglang_gauges import parse_metrics, read_account, read_loads
from pytest_kvcheck.engines.sglang_versions import golden_gauges
from pytest_kvcheck.observe.logs import LogEvent

PLAIN = golden_gauges("0.5.23", swa=False, sessions=True)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_gauges, "AGREE_PAUSE", 0.0)


def metrics(**values: Any) -> str:
    base = dict.fromkeys(PLAIN, 0) | {"max_total_num_tokens": 2048, "kv_available_tokens": 2048}
    return "".join(
        f'sglang:{name}{{pp_rank="0",tp_rank="0"}} {float(value)}\n'
        for name, value in (base | values).items()
        if value is not None
    )


def busy(pool: str = "full", **sums: int) -> LogEvent:
    base = {"total": 2048, "available": 0, "evictable": 0, "protected": 0, "session_held": 0, "uncached": 0}
    return LogEvent(0.0, 1, "busy", "account", "", "", {"pool": pool, **base, **sums})


def account(load: Any, text: Any, recent: list[LogEvent] | None = None, swa: bool = False) -> Any:
    golden = golden_gauges("0.5.23", swa=swa, sessions=True)
    control = FakeControl({"/v1/loads": load, "/metrics": text})
    return read_account(control, 1.0, recent or [], golden, swa)


def test_loads_give_running_waiting_and_used() -> None:
    sample = read_loads(FakeControl({"/v1/loads": loads(num_running_reqs=2, num_used_tokens=90)}), 3.0, False)
    assert (sample.running, sample.waiting, sample.error) == (2, 0, "")
    assert (sample.pools[0].used, sample.pools[0].total) == (90, 2048)


def test_of_two_pools_loads_tell_no_use() -> None:
    assert read_loads(FakeControl({"/v1/loads": loads(num_used_tokens=90)}), 3.0, True).pools == []


@pytest.mark.parametrize(
    "answer",
    [Answer(None, error="refused"), Answer(500, "x"), "no JSON", {"loads": []}, {"loads": [3]}, {"x": 1}, []],
)
def test_what_cannot_be_read_is_told_and_never_raised(answer: Any) -> None:
    assert read_loads(FakeControl({"/v1/loads": answer}), 0.0, False).error
    sample = account(answer, answer if isinstance(answer, (Answer, str)) else "")
    assert sample.error


def test_a_server_without_metrics_is_told_how_to_have_them() -> None:
    assert "--enable-metrics" in account(loads(), Answer(404)).error
    assert "--enable-metrics" not in account(loads(), Answer(None, error="refused")).error


def test_an_account_at_rest() -> None:
    text = metrics(kv_available_tokens=2000, kv_evictable_tokens=48, num_aborted_requests_total=3)
    sample = account(loads(), text)
    full = sample.pool("full")
    assert (full.total, full.used, full.available, full.evictable) == (2048, 0, 2000, 48)
    assert (sample.running, sample.sessions, sample.aborted_total) == (0, 0, 3)
    assert (sample.missing, sample.error) == ([], "")


def test_a_missing_gauge_is_named() -> None:
    sample = account(loads(), metrics(kv_evictable_tokens=None))
    assert sample.missing == ["sglang:kv_evictable_tokens"]


def test_metrics_from_before_a_close_are_not_mixed_with_fresh_ones() -> None:
    stale = metrics(kv_available_tokens=1000, kv_used_tokens=1048, streaming_session_held_tokens=1000)
    full = account(loads(num_used_tokens=0), stale).pool("full")
    assert (full.used, full.available, full.evictable, full.session_held) == (0, None, None, None)


def test_a_session_gauge_greater_than_all_use_is_stale() -> None:
    full = account(loads(), metrics(streaming_session_held_tokens=1004)).pool("full")
    assert (full.used, full.session_held) == (0, None)


def test_the_last_busy_line_of_the_same_moment_splits_the_use() -> None:
    recent = [
        busy(available=1, evictable=1, protected=99),
        busy(available=2000, evictable=8, protected=30, session_held=9, uncached=1),
        busy("swa", available=5),
    ]
    text = metrics(kv_available_tokens=2000, kv_evictable_tokens=8, kv_used_tokens=40)
    full = account(loads(num_used_tokens=40), text, recent).pool("full")
    assert (full.protected, full.session_held, full.uncached) == (30, 9, 1)


LOCKED = metrics(
    kv_available_tokens=2000, kv_evictable_tokens=8, kv_used_tokens=40, streaming_session_held_tokens=10
)


def test_at_rest_the_rest_is_locked_if_the_strict_checks_agree() -> None:
    full = account(loads(num_used_tokens=40), LOCKED, [busy(available=1999, evictable=4)]).pool("full")
    assert (full.protected, full.session_held, full.uncached) == (30, 10, 0)


@pytest.mark.parametrize("recent", [[], [busy(available=1), LogEvent(0.0, 2, "idle-pool", "leak", "K01", "")]])
def test_nothing_is_called_locked_where_no_check_vouches(recent: list[LogEvent]) -> None:
    full = account(loads(num_used_tokens=40), LOCKED, recent).pool("full")
    assert (full.used, full.protected, full.session_held) == (40, None, 10)


def test_the_log_knows_sooner_than_the_gauge_how_many_sessions_are_open() -> None:
    closed = LogEvent(0.0, 1, "session-closed", "session", "", "", {"session": "a", "active": 0})
    assert account(loads(), metrics(num_streaming_sessions=1)).sessions == 1
    assert account(loads(), metrics(num_streaming_sessions=1), [closed]).sessions == 0


def test_ranks_of_tensor_parallel_count_once_and_those_of_data_parallel_add_up() -> None:
    rows = [("0", "0"), ("0", "1"), ("1", "0")]
    text = "".join(f'sglang:kv_used_tokens{{dp_rank="{dp}",tp_rank="{tp}"}} 7.0\n' for dp, tp in rows)
    assert parse_metrics(text, {"kv_used_tokens"}) == {"kv_used_tokens": 14}


def test_lines_that_are_no_metric_are_passed_over() -> None:
    text = "sglang:kv_used_tokens{a= 3\nsglang:kv_used_tokens NaN\nsglang:kv_used_tokens_more 4\n\x00"
    assert parse_metrics(text, {"kv_used_tokens"}) == {}


@pytest.mark.parametrize(
    ("version", "file", "swa"),
    [
        ("0.5.23", "sglang-0.5.23-metrics.txt", False),
        ("0.5.23", "sglang-0.5.23-swa-metrics.txt", True),
        ("0.5.12.post1", "sglang-0.5.12.post1-metrics.txt", False),
        ("0.5.99", "sglang-0.5.23-metrics.txt", False),
        ("", "sglang-0.5.23-metrics.txt", False),
    ],
)
def test_recorded_metrics_of_a_release_have_all_that_is_asked_of_it(version: str, file: str, swa: bool) -> None:
    text = (GOLDEN / file).read_text()
    golden = golden_gauges(version, swa=swa, sessions=True)
    control = FakeControl({"/v1/loads": loads(max_total_num_tokens=4096), "/metrics": text})
    sample = read_account(control, 0.0, [], golden, swa)
    assert sample.missing == []
    for gauge in sample.pools:
        assert gauge.available is not None
        assert gauge.evictable is not None
        assert gauge.total == gauge.available + gauge.evictable + (gauge.used or 0)


def test_old_releases_are_asked_for_what_they_have() -> None:
    assert "kv_used_tokens" not in golden_gauges("0.5.10", swa=False, sessions=True)
    assert "kv_used_tokens" in golden_gauges("0.5.11", swa=False, sessions=False)
    assert "num_streaming_sessions" not in golden_gauges("0.5.11", swa=False, sessions=False)


def test_the_adapter_tells_a_window_pool_by_the_servers_own_word() -> None:
    engine = SglangEngine()
    info = {"version": "0.5.23", "internal_states": [{"memory_usage": {"token_capacity_swa": 1638}}]}
    assert engine.identify(FakeControl({"/server_info": info})) == info
    assert engine.swa


def test_an_old_release_shows_its_window_pool_with_the_first_batch() -> None:
    info = {"version": "0.5.12.post1", "internal_states": [{"memory_usage": {"token_capacity": 9}}]}
    for value, pools in ((0, ["full"]), (2048, ["full", "swa"])):
        engine = SglangEngine()
        answers = {"/server_info": info, "/v1/loads": loads(), "/metrics": metrics(swa_available_tokens=value)}
        control = FakeControl(answers)
        engine.identify(control)
        assert [gauge.pool for gauge in engine.account(control, 0.0, []).pools] == pools


@pytest.mark.parametrize(
    ("models", "context"), [({"data": [{"id": "m", "max_model_len": 8192}]}, 8192), ("no JSON", None)]
)
def test_a_context_that_no_flag_gave_is_the_models_own(models: object, context: int | None) -> None:
    control = FakeControl({"/server_info": {"context_length": None}, "/v1/models": models})
    engine = SglangEngine()
    info = engine.identify(control)
    assert info["context_length"] == context
    assert engine.adopt(cell("sglang"), info).features.context_length == (context or 4096)


@pytest.mark.parametrize("name", ["sglang", "reference"])
def test_a_server_that_says_nothing_of_itself_is_a_misfit(name: str) -> None:
    engine = make_engine(name)
    info = engine.identify(FakeControl({"/server_info": "hello"}))
    assert info == {}
    assert engine.misfits(cell(name), info)
