"""Stop ids and several samples: plans, wires, what oracles say, and the reference engine's account of them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import client_helpers
import pytest
import sglang_helpers
import vllm_helpers
from oracle_helpers import facts_of, op_record
from reference_helpers import Client, tokens, worst_difference, write_draft, write_model

from pytest_kvcheck.cells import Speculative
from pytest_kvcheck.engines import sglang_wire, vllm_wire
from pytest_kvcheck.oracles.references import emitted
from pytest_kvcheck.oracles.session_arithmetic import judge_session_arithmetic
from pytest_kvcheck.reference.batch import Request, Sampling
from pytest_kvcheck.reference.engine import Options, Speculation
from pytest_kvcheck.trace import Reply
from pytest_kvcheck.workloads import make_plan
from pytest_kvcheck.workloads.plan import PlanBuilder, check_plan

GROUP: dict[str, Any] = {"stream": False, "samples": 2, "logprobs": "output"}


# --- plans ---------------------------------------------------------------------------------------------
def test_stop_ids_are_a_seeded_quarter_of_the_vocabulary_but_not_of_a_large_one() -> None:
    made = make_plan("stop-ids", client_helpers.cell(), vocab_size=512, seed=1)
    asked = [op for op in made.operations if op.generates]
    (stop_ids,) = {op.stop_ids for op in asked}
    assert len(set(stop_ids)) == (512 - 20) // 4
    assert {op.kind for op in asked} == {"turn", "generate"}
    assert made.must_exercise == ("stopped", "cached_turn")
    assert len(PlanBuilder("large", 1, 128_000).stop_ids()) == 2048


def test_speculation_must_be_seen_where_the_cell_speculates() -> None:
    cell = client_helpers.cell(speculative=Speculative())
    assert "speculation" in make_plan("stop-ids", cell, vocab_size=512, seed=1).must_exercise


def test_groups_of_two_to_four_share_a_prefix_and_one_group_is_left() -> None:
    made = make_plan("parallel-samples", client_helpers.cell(), vocab_size=512, seed=1, params={"rounds": 1})
    groups = [op for op in made.operations if op.samples > 1]
    assert [op.samples for op in groups] == [2, 3, 4, 3]
    assert len({op.input_ids[:32] for op in groups}) == 1
    assert not any(op.stream for op in groups)
    assert [op.target for op in made.operations if op.kind == "disconnect"] == [groups[-1].id]


def test_several_samples_are_for_plain_requests_without_a_stream() -> None:
    plan = PlanBuilder("streamed", 1, 512)
    plan.generate(8, 4, samples=2)
    with pytest.raises(ValueError, match="several samples of a plain request only, not streamed"):
        check_plan(plan.operations)


# --- wires ---------------------------------------------------------------------------------------------
def test_sglang_heeds_stop_ids_only_where_it_heeds_the_end_of_sequence() -> None:
    def params(**fields: Any) -> Any:
        op = sglang_helpers.operation(**fields)
        return sglang_wire.request_call(op, "r", None, []).json["sampling_params"]

    assert params(stop_ids=(7, 9)) == {
        "temperature": 0,
        "max_new_tokens": 2,
        "ignore_eos": False,
        "stop_token_ids": [7, 9],
    }
    assert params(samples=3, stream=False)["n"] == 3
    assert params() == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}


def test_vllm_gets_stop_ids_and_samples() -> None:
    op = vllm_helpers.operation(stop_ids=(7, 9), samples=3, stream=False)
    body = vllm_wire.request_call(op, "r", []).json
    assert (body["stop_token_ids"], body["n"], body["ignore_eos"]) == ([7, 9], 3, True)
    assert (body["temperature"], body["top_p"]) == (1, 1e-9), "several answers of temperature 0 are refused"
    turn = vllm_helpers.operation("turn", session="s", stop_ids=(7,))
    assert vllm_wire.session_call(turn, "r", "s").json["stop_token_ids"] == [7]


Answer = tuple[list[int], float]  # token ids, and the log-prob of the first


def of_sglang(answers: list[Answer], **fields: Any) -> Reply:
    parser = sglang_wire.SglangParser(sglang_helpers.operation(**{**GROUP, **fields}))
    shown = []
    for ids, first in answers:
        finish = {"type": "length", "length": 2} if len(ids) == 2 else {"type": "stop", "matched": ids[-1]}
        shown.append(
            sglang_helpers.event(ids, finish, output_token_logprobs=sglang_helpers.pairs(ids, first=first))
        )
    parser.feed(json.dumps(shown if len(shown) > 1 else shown[0]).encode())
    return parser.finish(200)


def of_vllm(answers: list[Answer], told: int | None = None, **fields: Any) -> Reply:
    parser = vllm_wire.CompletionParser(vllm_helpers.operation(**{**GROUP, **fields}), 0)
    choices: list[Any] = []
    for index, (ids, first) in enumerate(answers):
        reason = "length" if len(ids) == 2 else "stop"
        body = vllm_helpers.event(ids, [first, -0.5][: len(ids)], reason, index=index)
        choices += body["choices"]
    total = sum(len(ids) for ids, _ in answers) if told is None else told
    body = {"id": "cmpl-r", "choices": choices, "usage": vllm_helpers.usage(3, total)}
    parser.feed(json.dumps(body).encode())
    return parser.finish(200)


both = pytest.mark.parametrize("read", [of_sglang, of_vllm], ids=["sglang", "vllm"])


@both
def test_the_first_answer_is_the_reply_and_holds_the_others(read: Any) -> None:
    reply = read([([8, 9], -0.5), ([8, 9], -0.5)])
    assert (reply.finish, reply.output_ids, reply.completion_tokens, reply.faults) == ("length", [8, 9], 2, [])
    assert [other.output_ids for other in reply.samples] == [[8, 9]]


@both
def test_a_missing_answer_and_one_of_another_length_are_faults(read: Any) -> None:
    (fault,) = read([([8, 9], -0.5)]).faults
    assert fault == "expected 2 answers, found 1"
    faults = read([([8, 9], -0.5), ([8], -0.5)]).faults
    assert "expected answers of one length, found 2, 1 tokens" in faults


@both
@pytest.mark.parametrize(
    ("mine", "theirs", "wrong"),
    [
        (math.log(0.49), math.log(0.48), False),  # two tokens about equally likely
        (-1.2, -1.6, False),
        (-0.05, -0.05, True),  # two certainties
        (-1.0, -2.0, True),
    ],
)
def test_another_first_token_is_a_fault_unless_both_are_equally_likely(
    mine: float, theirs: float, wrong: bool, read: Any
) -> None:
    faults = read([([8, 9], mine), ([7, 9], theirs)]).faults
    assert any("begin with other tokens than one another: [8, 7]" in fault for fault in faults) is wrong
    assert bool(faults) is wrong


@both
def test_answers_part_after_their_first_token_and_then_stop_where_they_like(read: Any) -> None:
    assert read([([8, 9], -0.5), ([8, 6], -0.5)]).faults == []
    assert read([([8, 9], -0.5), ([8], -0.5)], stop_ids=(8,)).faults == []


def test_vllm_counts_the_tokens_of_all_answers() -> None:
    (fault,) = of_vllm([([8, 9], -0.5), ([8, 9], -0.5)], told=2).faults
    assert fault == "completion_tokens is 2, the token_ids of all choices 4"


def test_a_refused_group_is_refused_and_one_that_was_left_has_no_fault() -> None:
    op = sglang_helpers.operation(**GROUP)
    parser = sglang_wire.SglangParser(op)
    parser.feed(b'{"error": {"message": "too long"}}')
    assert parser.finish(400).finish == "rejected"
    assert sglang_wire.SglangParser(op).finish(None, "left", complete=False).faults == []


# --- oracles -------------------------------------------------------------------------------------------
def test_each_answer_is_compared_with_a_scoring_of_its_own() -> None:
    reply = of_sglang([([8, 9], -0.5), ([8, 6], -0.5)])
    record = op_record("generate", input_ids=(5, 6, 7), max_new_tokens=2, reply=reply, **GROUP)
    found = list(emitted([record]))
    assert [one.ids for one in found] == [(5, 6, 7, 8, 9), (5, 6, 7, 8, 6)]
    assert found[1].record.reply is reply.samples[0]


@pytest.mark.parametrize(("output", "wrong"), [([3, 4], False), ([3, 9], False), ([9, 3, 4], True)])
def test_what_goes_on_past_its_stop_id_is_wrong(output: list[int], wrong: bool) -> None:
    reply = Reply(finish="length", output_ids=output, prompt_tokens=2, completion_tokens=len(output))
    record = op_record(
        "turn", session="s", input_ids=(5, 6), max_new_tokens=len(output), stop_ids=(9,), reply=reply
    )
    found = judge_session_arithmetic(facts_of([record]))
    assert [one.kind for one in found] == (["K19"] if wrong else [])
    if wrong:
        assert "went on for 2 tokens past its stop id 9, and finished as length" in found[0].headline


def test_behind_a_closed_socket_a_turn_may_have_stopped_anywhere() -> None:
    def prompt(tokens: int, **fields: Any) -> list[Any]:
        left = op_record("turn", 1, at=1, session="s", input_ids=(5, 6), max_new_tokens=4, **fields)
        left.reply = Reply(finish="disconnected")
        after = op_record("turn", 2, at=3, session="s", input_ids=(5, 6), max_new_tokens=1)
        after.reply = Reply(finish="length", output_ids=[7], prompt_tokens=tokens, completion_tokens=1)
        return judge_session_arithmetic(facts_of([left, after]))

    assert not prompt(2 + 2 + 3, stop_ids=(9,))
    assert prompt(2 + 2 + 3)
    assert prompt(2 + 2 + 5, stop_ids=(9,))


# --- the reference engine ------------------------------------------------------------------------------
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "v1": {"v2": False},
    "v2": {},
    "v2-no-overlap": {"overlap": False},
    "v2-page-16": {"page_size": 16},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_draft(folder / "draft", write_model(folder / "full"))
    return folder


def client_of(models: Path, arm: str, **more: Any) -> Client:
    changes = dict(ARMS[arm])
    speculation = None if arm == "plain" else Speculation(models / "draft", v2=changes.pop("v2", True))
    settings = {"chunk": 64, "context": 512, "pool": 4096, "max_running": 8, **changes, **more}
    return Client(Options(models / "full", streaming_sessions=True, speculation=speculation, **settings))


def stop_everywhere(client: Client) -> list[tuple[Request, Request, list[int]]]:
    """For each place of an output a session whose first turn stops there: both turns, the second's prompt."""
    rng = random.Random(3)
    prompt, new = tokens(rng, 20), tokens(rng, 6)
    whole = client.send(prompt, 16)
    client.drain()
    found = []
    for stop in dict.fromkeys(whole.output):
        session = client.open()
        first = Request(f"stop at {stop}", list(prompt), Sampling(16, stop=frozenset({stop})))
        client.scheduler.submit(first, session)
        client.drain()
        assert first.output == whole.output[: whole.output.index(stop) + 1]
        assert first.finish == {"type": "stop", "matched": stop}
        second = client.send(new, 4, session)
        client.drain()
        found.append((first, second, prompt + first.output + new))
        client.scheduler.close_session(session)
    return found


@pytest.mark.parametrize("arm", ARMS)
def test_a_turn_inherits_what_was_shown_up_to_the_stop_and_nothing_behind_it(models: Path, arm: str) -> None:
    client = client_of(models, arm)
    behind = 0
    for first, second, whole in stop_everywhere(client):
        history = len(first.prompt) + len(first.output)
        assert second.prompt == whole
        assert history - 1 <= (second.cached or 0) <= history
        assert worst_difference(client.scheduler.executor.model, whole, second) < 1e-3
        sampled = 1 + sum((n + 1) * times for n, times in first.accepted.items())
        behind += sampled > len(first.output)
    assert behind or arm == "plain", "no stop fell in the middle of what a round accepted"
    client.drain()
    assert client.used == 0


def test_what_is_kept_behind_a_stop_shows(models: Path) -> None:
    turns = stop_everywhere(client_of(models, "v2", plant=("stop-overshoot-kept",)))
    over = [(second.cached or 0) - len(first.prompt + first.output) for first, second, _ in turns]
    assert max(over) > 0
    assert min(over) <= 0
