"""vLLM as a server that keeps sessions, which the middleware of ``vllm_cpu/inject`` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_helpers import FakeVllm, cell, event, operation

from pytest_kvcheck.client.control import Answer
from pytest_kvcheck.engines import vllm_launch
from pytest_kvcheck.engines.vllm import VllmEngine

MIDDLEWARE = {"middleware": vllm_launch.SESSIONS}


def engine(sessions: bool) -> VllmEngine:
    found = VllmEngine()
    answers = {"/version": '{"version": "0.32.0"}', "/kvcheck/sessions": '{"open": []}' if sessions else None}
    found.identify(
        FakeVllm(lambda method, path: Answer(200, text) if (text := answers.get(path)) else Answer(404, "{}"))
    )
    return found


def test_a_stock_server_keeps_no_sessions() -> None:
    stock = engine(sessions=False)
    assert stock.rules(cell()).sessions == "resent"
    assert stock.open_call(operation(), "s") is None
    assert stock.close_call("s") is None
    turn = operation("turn", session="s")
    assert stock.request_call(turn, "r", None, [1, 2]).json["prompt"] == [1, 2, 5, 6, 7]


def test_with_the_middleware_a_turn_sends_its_new_tokens_only() -> None:
    kept = engine(sessions=True)
    assert kept.rules(cell()).sessions == "streaming"
    assert "cached_turn" in kept.rules(cell()).lacks
    assert kept.open_call(operation(), "s") is not None
    turn = operation("turn", session="s", logprobs="output")
    call = kept.request_call(turn, "r", "s", [1, 2])
    assert call.path == "/kvcheck/turn"
    assert call.json["prompt"] == [5, 6, 7]
    assert call.json["session_id"] == "s"
    assert kept.request_call(operation(), "r", None, []).path == "/v1/completions"
    abort = kept.abort_call("r")
    assert abort is not None
    assert abort.json == {"request_ids": ["r"]}


@pytest.mark.parametrize("sessions", [False, True])
def test_the_prompts_log_probs_are_expected_where_they_come(sessions: bool) -> None:
    values = [None, -1.0, -1.0, -0.5] if not sessions else [-0.5]
    parser = engine(sessions).reply_parser(operation("turn", session="s", logprobs="input"), 0)
    parser.feed(json.dumps(event([41], values, reason="length", prompt_token_ids=[5, 6, 7])).encode())
    parser.feed(b"[DONE]")
    reply = parser.finish(200)
    assert reply.faults == []
    assert reply.output_logprobs == [-0.5]
    assert (reply.input_logprobs is None) == sessions


def test_the_cell_names_the_middleware_and_the_launch_finds_it(tmp_path: Path) -> None:
    one = cell(args=MIDDLEWARE)
    argv = vllm_launch.render(vllm_launch.flags(one, "cpu", "/m", None))
    assert argv[-2:] == ["--middleware", vllm_launch.SESSIONS]
    path = vllm_launch.environment(one, "cpu", tmp_path)["PYTHONPATH"]
    assert path is not None
    assert (Path(path) / "kvcheck_sessions.py").is_file()
    assert "PYTHONPATH" not in vllm_launch.environment(cell(), "cpu", tmp_path)
