"""vLLM's completions as calls and replies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_helpers import event, operation, usage

from pytest_kvcheck.engines.vllm_wire import CompletionParser, engine_request_id, request_call
from pytest_kvcheck.trace import Reply


def read(op: Any, *events: dict[str, Any], history: int = 0, done: bool = True, status: int = 200) -> Reply:
    parser = CompletionParser(op, history)
    for one in events:
        parser.feed(json.dumps(one).encode())
    if done and op.stream:
        parser.feed(b"[DONE]")
    return parser.finish(status, complete=done)


def test_a_turn_sends_its_whole_history() -> None:
    op = operation("turn", session="s", input_ids=(8, 9), max_new_tokens=4)
    call = request_call(op, "r1", [1, 2, 3])
    assert call.path == "/v1/completions"
    assert call.json["prompt"] == [1, 2, 3, 8, 9]
    assert call.json["request_id"] == "r1"
    assert engine_request_id("r1") == "cmpl-r1-0"
    assert "logprobs" not in call.json
    assert "echo" not in call.json


def test_a_plain_request_has_no_history() -> None:
    assert request_call(operation("generate"), "r", [1, 2, 3]).json["prompt"] == [5, 6, 7]


@pytest.mark.parametrize(
    ("given_op", "logprobs", "echo"),
    [
        (operation(logprobs="output"), 0, None),
        (operation(logprobs="input"), 0, True),
        (operation("score", stream=False, max_new_tokens=1), 1, True),
    ],
)
def test_log_probs_are_asked_for_in_the_way_that_streams(
    given_op: Any, logprobs: int, echo: bool | None
) -> None:
    body = request_call(given_op, "r", []).json
    assert body["logprobs"] == logprobs
    assert body.get("echo") is echo
    assert "prompt_logprobs" not in body, "vLLM refuses it in a stream"


def test_an_invalid_request_is_one_that_every_release_refuses() -> None:
    assert request_call(operation(invalid="offset"), "r", []).json["logit_bias"] == {"2147483647": 1.0}


def test_a_stream_gives_ids_log_probs_and_counts() -> None:
    reply = read(
        operation("turn", session="s", logprobs="output"),
        event([41], [-0.5]),
        event([42], [-0.25], reason="length"),
        {"choices": [], "usage": usage(67, 2, cached=64)},
        history=64,
    )
    assert reply.finish == "length"
    assert reply.output_ids == [41, 42]
    assert reply.output_logprobs == [-0.5, -0.25]
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (67, 2, 64)
    assert reply.faults == []


def test_an_echo_is_split_into_prompt_and_output() -> None:
    reply = read(
        operation(logprobs="input"),
        event([41], [None, -1.0, -2.0, -0.5], prompt_token_ids=[5, 6, 7]),
        event([42], [-0.25], reason="length"),
        {"choices": [], "usage": usage(3, 2)},
    )
    assert reply.input_logprobs == [None, -1.0, -2.0]
    assert reply.output_logprobs == [-0.5, -0.25]
    assert reply.input_ids == [5, 6, 7]
    assert reply.cached_tokens is None, "an echo reads nothing from the cache, so its 0 says nothing"
    assert reply.faults == []


def test_a_score_gives_the_greatest_log_prob_too() -> None:
    reply = read(
        operation("score", stream=False, max_new_tokens=1),
        event([41], [None, -1.5, -2.5, -0.5], reason="length", prompt_token_ids=[5, 6, 7], usage=usage(3, 1)),
    )
    assert reply.top_logprobs == [None, -0.5, -1.5]
    assert reply.faults == []


def test_an_abort_keeps_what_it_had() -> None:
    reply = read(operation(), event([41]), event([], reason="abort"), {"choices": [], "usage": usage(3, 1)})
    assert reply.finish == "abort"
    assert reply.output_ids == [41]
    assert reply.faults == []


def test_a_refusal_is_no_fault_of_the_protocol() -> None:
    error = {"error": {"message": "maximum context length is 512 tokens", "code": 400}}
    reply = read(operation(stream=False), error, status=400)
    assert reply.finish == "rejected"
    assert "maximum context" in reply.message
    assert reply.faults == []


def test_a_refusal_inside_a_stream_counts_as_one() -> None:
    reply = read(operation(), {"error": {"message": "out of vocabulary", "code": 400}})
    assert reply.finish == "rejected"
    assert reply.faults == []


def test_a_dead_engine_core_is_an_error() -> None:
    reply = read(
        operation(), event([41]), {"error": {"message": "EngineCore encountered an issue", "code": 500}}
    )
    assert reply.finish == "error"
    assert "EngineCore" in reply.message


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (
            [event([41]), event([42], reason="length"), {"choices": [], "usage": usage(3, 3)}],
            "completion_tokens is 3",
        ),
        ([event([], reason="stop")], "without a token"),
        ([event([41, 42])], "without a finish reason"),
        ([{"choices": []}], "expected one choice"),
        ([event([41, "x"], reason="length")], "expected token_ids"),  # type: ignore[list-item]
    ],
)
def test_what_does_not_fit_is_a_fault(events: list[dict[str, Any]], fault: str) -> None:
    assert any(fault in text for text in read(operation(), *events).faults)


def test_an_abort_before_the_first_token_is_told_by_the_counts_alone() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 0}
    reply = read(operation(), {"choices": [], "usage": usage})
    assert (reply.finish, reply.faults) == ("abort", [])
    unended = read(operation(), {"choices": [], "usage": usage}, done=False)
    assert unended.finish == "error"
    assert any("without a finish reason" in fault for fault in unended.faults)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([-0.5], "expected 2 log-probs"),
        ([-0.5, None], "position 1 is missing or NaN"),
        ([-0.5, float("nan")], "position 1 is missing or NaN"),
        ([-0.5, 0.5], "position 1 is positive"),
        ([-0.5, -9999.0], "position 1 is minus infinity"),
    ],
)
def test_a_bad_log_prob_is_a_fault(values: list[Any], fault: str) -> None:
    reply = read(operation(logprobs="output"), event([41, 42], values, reason="length"))
    assert any(fault in text for text in reply.faults)


def test_a_cut_stream_is_a_fault_and_keeps_what_came() -> None:
    reply = read(operation(), event([41]), done=False)
    assert reply.finish == "error"
    assert reply.output_ids == [41]
    assert any("end mark" in text for text in reply.faults)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
                lambda inner: st.one_of(
                    st.lists(inner, max_size=3),
                    st.dictionaries(
                        st.sampled_from(["choices", "usage", "error", "token_ids", "logprobs"]),
                        inner,
                        max_size=3,
                    ),
                ),
                max_leaves=8,
            ).map(lambda value: json.dumps(value).encode()),
        ),
        max_size=4,
    )
)
def test_garbage_never_raises(chunks: list[bytes]) -> None:
    for op in (operation(logprobs="input"), operation("score", stream=False)):
        parser = CompletionParser(op, 0)
        for chunk in chunks:
            parser.feed(chunk)
        parser.finish(200)
