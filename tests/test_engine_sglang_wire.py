"""SGLang's protocol as calls and replies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_helpers import LENGTH, event, operation, pairs

from pytest_kvcheck.engines.sglang_wire import SglangParser, open_call, request_call
from pytest_kvcheck.trace import Reply


def read(
    op: Any, *events: Any, done: bool = True, status: int | None = 200, incremental: bool = False, **end: Any
) -> Reply:
    parser = SglangParser(op, incremental=incremental)
    for one in events:
        parser.feed(one if isinstance(one, bytes) else json.dumps(one).encode())
    if done and op.stream:
        parser.feed(b"[DONE]")
    return parser.finish(status, **{"complete": done, **end})


# --- calls ---------------------------------------------------------------------------------------------
def test_a_turn_sends_only_what_is_new_to_its_session() -> None:
    body = request_call(operation("turn", session="a"), "r1", "s-1", [1, 2, 3]).json
    assert body["input_ids"] == [5, 6, 7]
    assert body["session_params"] == {"id": "s-1"}
    assert body["rid"] == "r1"
    assert "return_logprob" not in body


def test_without_sessions_on_the_server_a_turn_sends_the_whole_history() -> None:
    body = request_call(operation("turn", session="a"), "r1", None, [1, 2, 3]).json
    assert body["input_ids"] == [1, 2, 3, 5, 6, 7]
    assert "session_params" not in body


def test_a_plain_request_sends_no_history() -> None:
    assert request_call(operation(), "r", None, [1, 2, 3]).json["input_ids"] == [5, 6, 7]


@pytest.mark.parametrize(
    ("op", "start", "top"),
    [
        (operation(logprobs="output"), None, None),
        (operation(logprobs="input"), 0, None),
        (operation("score"), 0, 1),
    ],
)
def test_log_probs_are_asked_for(op: Any, start: int | None, top: int | None) -> None:
    body = request_call(op, "r", None, []).json
    assert body["return_logprob"] is True
    assert body.get("logprob_start_len") == start
    assert body.get("top_logprobs_num") == top


@pytest.mark.parametrize("name", ["offset", "replace", "drop_previous_output"])
def test_a_defect_to_be_refused_is_sent(name: str) -> None:
    body = request_call(operation("turn", session="a", invalid=name), "r", "s", []).json
    assert body["session_params"][name]


def test_a_session_has_the_id_and_the_timeout_that_were_asked_for() -> None:
    assert open_call("s-1", None).json["session_id"] == "s-1"
    assert "timeout" not in open_call("s-1", None).json
    assert open_call("s-1", 2.5).json["timeout"] == 2.5


# --- replies -------------------------------------------------------------------------------------------
def test_events_are_cumulative() -> None:
    reply = read(operation(), event([8]), event([8, 9], LENGTH, cached_tokens=2, spec_verify_ct=1))
    assert reply.finish == "length"
    assert reply.output_ids == [8, 9]
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (3, 2, 2)
    assert (reply.retractions, reply.spec_verify_steps, reply.events) == (0, 1, 2)
    assert reply.faults == []


def test_events_may_carry_only_what_is_new() -> None:
    op = operation(logprobs="input")
    first = event([8], output_token_logprobs=pairs([8]), input_token_logprobs=pairs([5, 6, 7], None))
    last = event([9], LENGTH, completion_tokens=2, output_token_logprobs=pairs([9]))
    reply = read(op, first, last, incremental=True)
    assert reply.output_ids == [8, 9]
    assert reply.input_ids == [5, 6, 7]
    assert reply.faults == []


def test_an_abort_in_the_queue_repeats_no_token() -> None:
    abort = event([9], {"type": "abort", "message": "Abort in waiting queue"}, completion_tokens=2)
    reply = read(
        operation(max_new_tokens=5), event([8]), event([9], completion_tokens=2), abort, incremental=True
    )
    assert (reply.finish, reply.output_ids, reply.faults) == ("abort", [8, 9], [])
    # Releases up to 0.5.13 at least do so in a cumulative stream as well.
    reply = read(operation(max_new_tokens=5), event([8]), event([8, 9]), abort)
    assert (reply.finish, reply.output_ids, reply.faults) == ("abort", [8, 9], [])
    abort["meta_info"]["completion_tokens"] = 1
    reply = read(operation(max_new_tokens=5), event([8]), event([8, 9]), abort)
    assert "changed tokens that it had shown" in reply.faults[0]


def test_both_names_of_the_retraction_count_are_read() -> None:
    old = event([8, 9], LENGTH, total_retractions=4)
    del old["meta_info"]["num_retractions"]
    assert read(operation(stream=False), old).retractions == 4


def test_log_probs_of_output_and_prompt() -> None:
    op = operation("score", stream=False)
    body = event(
        [8, 9],
        LENGTH,
        output_token_logprobs=pairs([8, 9]),
        input_token_logprobs=pairs([5, 6, 7], None),
        input_top_logprobs=[None, [[-0.25, 40, None]], [[-0.125, 41, None]]],
    )
    reply = read(op, body)
    assert reply.output_logprobs == [-0.5, -1.5]
    assert reply.input_logprobs == [None, -1.5, -2.5]
    assert reply.top_logprobs == [None, -0.25, -0.125]
    assert (reply.input_start, reply.input_ids, reply.faults) == (0, [5, 6, 7], [])


def test_a_session_may_give_no_log_probs_of_its_prompt() -> None:
    op = operation("turn", session="a", logprobs="input")
    body = event([8, 9], LENGTH, prompt_tokens=40, output_token_logprobs=pairs([8, 9]), input_token_logprobs=[])
    reply = read(op, body)
    assert (reply.input_logprobs, reply.input_start, reply.faults) == ([], 40, [])


def test_a_session_that_gives_the_new_part_says_where_it_starts() -> None:
    op = operation("turn", session="a", logprobs="input")
    body = event([8, 9], LENGTH, prompt_tokens=40, output_token_logprobs=pairs([8, 9]))
    body["meta_info"]["input_token_logprobs"] = pairs([5, 6, 7], None)
    reply = read(op, body)
    assert (reply.input_start, reply.input_ids, reply.faults) == (37, [5, 6, 7], [])


def test_an_id_that_is_echoed_as_0_is_not_told() -> None:
    body = changed(input_token_logprobs=pairs([5, 0, 7], None))
    assert read(operation(logprobs="input", stream=False), body).faults == []


def test_what_is_said_of_a_token_that_nobody_asked_for_is_no_fault() -> None:
    op = operation("score", stream=False, max_new_tokens=0)
    meta = {
        "input_token_logprobs": pairs([5, 6, 7], None),
        "input_top_logprobs": [None, [[-1.0, 4]], [[-1.0, 4]]],
    }
    reply = read(op, event([], LENGTH, output_token_logprobs=pairs([9]), **meta))
    assert (reply.output_logprobs, reply.faults) == ([], [])


# --- refusals and aborts -------------------------------------------------------------------------------
REFUSED = {"type": "abort", "message": "Streaming sessions do not support offset.", "status_code": 400}


@pytest.mark.parametrize(
    ("stream", "status", "body"),
    [
        (False, 400, {"error": {"message": "The input (1100 tokens) is longer than the model's context."}}),
        (True, 200, {"error": {"message": "The input is longer than ...", "code": 400}}),
        (True, 200, event([35], REFUSED, prompt_tokens=1)),
        (True, 200, event([], {"type": "abort", "message": "Input length (600 tokens) exceeds the maximum"})),
        (False, 422, {"detail": [{"msg": "field required"}]}),
        (False, 400, b"no JSON at all"),
    ],
)
def test_a_refusal_is_no_abort_and_shows_nothing(stream: bool, status: int, body: Any) -> None:
    reply = read(operation(stream=stream, logprobs="output"), body, status=status)
    assert reply.finish == "rejected"
    assert reply.output_ids == []
    assert reply.prompt_tokens is None
    assert reply.message


def test_an_abort_keeps_what_was_shown() -> None:
    abort = event([8, 9], {"type": "abort", "message": "Aborted", "status_code": None})
    reply = read(operation(max_new_tokens=9), event([8]), abort)
    assert (reply.finish, reply.output_ids, reply.faults) == ("abort", [8, 9], [])


def test_an_abort_before_the_first_token_needs_no_log_probs() -> None:
    body = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in queue"}}}
    reply = read(operation(logprobs="input"), body)
    assert (reply.finish, reply.faults) == ("abort", [])


@pytest.mark.parametrize(("status", "finish"), [(503, "abort"), (500, "error"), (400, "rejected")])
def test_the_status_of_an_abort_says_whose_doing_it_was(status: int, finish: str) -> None:
    body = event([8], {"type": "abort", "message": "x", "status_code": status})
    assert read(operation(), body).finish == finish


def test_an_answer_of_500_is_an_error() -> None:
    reply = read(operation(stream=False), {"error": {"message": "boom"}}, status=500)
    assert (reply.finish, reply.message) == ("error", "boom")


def test_no_answer_at_all_is_an_error_with_the_reason() -> None:
    reply = read(operation(), done=False, status=None, error="connection reset")
    assert (reply.finish, reply.message, reply.faults) == ("error", "connection reset", [])


# --- faults --------------------------------------------------------------------------------------------
GOOD = event([8, 9], LENGTH, output_token_logprobs=pairs([8, 9]), input_token_logprobs=pairs([5, 6, 7], None))


def changed(**meta: Any) -> dict[str, Any]:
    return {"output_ids": [8, 9], "meta_info": {**GOOD["meta_info"], **meta}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (changed(output_token_logprobs=pairs([8, 9])[:1]), "output_token_logprobs has 1 entries"),
        (changed(output_token_logprobs=pairs([9, 8])), "names other tokens than output_ids"),
        (changed(output_token_logprobs=[[None, 8, None], [-1.0, 9, None]]), "at position 0 is missing or NaN"),
        (changed(output_token_logprobs=[[0.5, 8, None], [-1.0, 9, None]]), "is positive: 0.5"),
        (changed(output_token_logprobs=[["x", 8, None], [-1.0, 9, None]]), "expected [log-prob, id, text]"),
        (changed(output_token_logprobs=None), "output_token_logprobs has 0 entries"),
        (changed(input_token_logprobs=pairs([5, 6], None)), "input_token_logprobs has 2 entries"),
        (changed(input_token_logprobs=[*pairs([5, 6], None), [None, 7, None]]), "position 2 is missing"),
        (changed(input_token_logprobs=pairs([5, 6, 99], None)), "names other tokens than were sent"),
        (changed(completion_tokens=7), "completion_tokens is 7, output_ids 2"),
        (changed(cached_tokens=-1), "expected cached_tokens as a whole number"),
        (changed(finish_reason=None), "expected a finish reason"),
        ({"output_ids": "no", "meta_info": GOOD["meta_info"]}, "expected output_ids as a list of integers"),
        ({"output_ids": [8, 9]}, "expected meta_info"),
        ([1, 2], "expected a JSON object"),
    ],
)
def test_what_violates_the_protocol_is_a_fault(body: Any, words: str) -> None:
    reply = read(operation(logprobs="input", stream=False), body)
    assert any(words in fault for fault in reply.faults), reply.faults


def test_the_same_answer_without_a_defect_has_no_fault() -> None:
    assert read(operation(logprobs="input", stream=False), GOOD).faults == []


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_none_become_faults_and_none(value: bytes) -> None:
    text = json.dumps(changed(output_token_logprobs=[["X", 8, None], [-1.0, 9, None]])).encode()
    reply = read(operation(logprobs="output", stream=False), text.replace(b'"X"', value))
    assert reply.output_logprobs == [None, -1.0]
    assert len(reply.faults) == 1


def test_a_stream_without_its_end_is_cut() -> None:
    reply = read(operation(), event([8]), done=False)
    assert reply.finish == "error"
    assert [fault for fault in reply.faults if "without its end mark" in fault]


def test_a_stream_that_finished_but_lacks_the_end_mark_is_a_fault() -> None:
    assert len(read(operation(), event([8, 9], LENGTH), done=False).faults) == 1


def test_a_stream_that_goes_on_after_its_end_mark_is_a_fault() -> None:
    reply = read(operation(), event([8, 9], LENGTH), b"[DONE]", event([8, 9], LENGTH), done=False)
    assert reply.faults == ["the stream went on after its end mark [DONE]"]


def test_a_stream_that_takes_tokens_back_is_a_fault() -> None:
    reply = read(operation(), event([8]), event([7, 9], LENGTH))
    assert "changed tokens that it had shown" in reply.faults[0]


def test_a_finish_without_a_token_is_a_fault_unless_none_was_asked_for() -> None:
    assert read(operation(), event([], LENGTH)).faults
    assert read(operation("generate", max_new_tokens=0), event([], LENGTH)).faults == []


def test_faults_of_a_sort_are_told_once_with_their_number() -> None:
    body = changed(output_token_logprobs=[[None, 8, None], [None, 9, None]])
    reply = read(operation(logprobs="output", stream=False), body)
    assert reply.faults == ["the output log-prob at position 0 is missing or NaN (2 such)"]


# --- whatever comes ------------------------------------------------------------------------------------
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
META = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            "finish_reason",
            "prompt_tokens",
            "completion_tokens",
            "cached_tokens",
            "num_retractions",
            "spec_verify_ct",
            "output_token_logprobs",
            "input_token_logprobs",
            "input_top_logprobs",
        ),
        JSON,
    ),
)
EVENT = st.fixed_dictionaries({}, optional={"output_ids": JSON, "meta_info": META | JSON, "error": JSON})
OPERATIONS = st.sampled_from(
    [operation(kind, stream=s, logprobs=p, session="a") for kind in ("turn", "generate", "score")
     for s in (True, False) for p in ("none", "output", "input")]
)  # fmt: skip


@given(
    OPERATIONS,
    st.lists(st.binary(max_size=40) | st.one_of(EVENT, JSON).map(lambda x: json.dumps(x).encode()), max_size=4),
    st.booleans(),
    st.none() | st.sampled_from([200, 400, 500]),
    st.booleans(),
)
def test_no_bytes_make_the_parser_raise(
    op: Any, data: list[bytes], incremental: bool, status: int | None, complete: bool
) -> None:
    parser = SglangParser(op, incremental=incremental)
    for one in data:
        parser.feed(one)
        assert parser.shown >= 0
    reply = parser.finish(status, complete=complete)
    assert all(isinstance(token, int) for token in reply.output_ids)
    assert all(isinstance(fault, str) for fault in reply.faults)
