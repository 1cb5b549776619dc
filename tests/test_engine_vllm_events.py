"""vLLM's KV events: what they say of stored blocks, whose a leak's blocks are, and the socket between."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from oracle_helpers import facts_of, gauges, make_cell, sample
from vllm_helpers import cell, operation

from pytest_kvcheck.engines import vllm_events
from pytest_kvcheck.engines.base import LaunchInputs
from pytest_kvcheck.engines.vllm import VllmEngine
from pytest_kvcheck.engines.vllm_events import BlockEvents
from pytest_kvcheck.observe.blocks import StoredBlock
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.oracles.conservation import judge_conservation
from pytest_kvcheck.oracles.kept import kept_for
from pytest_kvcheck.trace import OpRecord, Reply
from pytest_kvcheck.workloads.replay import MOST_OVERWRITTEN, overwrite_plan

RECORDED = Path(__file__).parents[1] / "fixtures" / "golden" / "vllm-0.32.0-kv-events.jsonl"


def stored(
    hashes: list[Any], parent: Any, tokens: list[int], size: int = 2, user: str | None = None
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 0,
        "session_id": user,
    }


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


def events_of(*batches: list[Any]) -> BlockEvents:
    events = BlockEvents()
    for number, batch in enumerate(batches):
        events.take(number, msgspec.msgpack.encode([1.5, batch, 0]))
    assert events.complete
    return events


def prefixes(events: BlockEvents) -> list[tuple[int, ...]]:
    return sorted(block.prefix() for block in events.book.snapshot().values())


def test_blocks_build_on_their_parents_and_go_with_their_removal() -> None:
    events = events_of(
        [stored([b"a", b"b"], None, [1, 2, 3, 4], user="r1")],
        [stored([b"c"], b"b", [5, 6], user="r1"), stored([b"d"], b"a", [7, 8], user="r2")],
        [removed(b"c")],
    )
    assert prefixes(events) == [(1, 2), (1, 2, 3, 4), (1, 2, 7, 8)]
    events.take(3, msgspec.msgpack.encode([2.0, [{"type": "AllBlocksCleared"}], 0]))
    assert prefixes(events) == []


def test_a_block_that_is_hit_has_one_more_user() -> None:
    events = events_of([stored([b"a"], None, [1, 2], user="r1")], [stored([b"a"], None, [1, 2], user="r2")])
    (block,) = events.book.snapshot().values()
    assert block.users == ["r1", "r2"]


def test_events_of_older_releases_are_arrays() -> None:
    events = events_of(
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]],
        [["BlockRemoved", [12], "GPU"], ["BlockStored", [13], 11, [9, 9], 2, None]],
    )
    assert prefixes(events) == [(1, 2), (1, 2, 9, 9)]
    assert [block.users for block in events.book.snapshot().values()] == [[""], [""]]


def test_copies_elsewhere_and_unknown_events_are_passed_over() -> None:
    copy = stored([b"a"], None, [1, 2]) | {"medium": "CPU"}
    assert prefixes(events_of([copy, {"type": "SomethingNew", "medium": "GPU"}])) == []


def test_of_a_run_with_blocks_left_out_no_block_says_which_tokens_it_holds() -> None:
    events = events_of([stored([b"a", b"c"], None, [1, 2, 3, 4, 5, 6], user="r1")])
    assert [(b.prefix(), b.users) for b in events.book.snapshot().values()] == [((), ["r1"])] * 2


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1, [7]])]
)
def test_what_cannot_be_understood_makes_the_account_incomplete(payload: bytes) -> None:
    events = BlockEvents()
    events.take(0, payload)
    assert not events.complete


def test_a_missed_batch_makes_the_account_incomplete() -> None:
    events = BlockEvents()
    events.take(0, msgspec.msgpack.encode([1.0, [], 0]))
    events.take(2, msgspec.msgpack.encode([1.0, [], 0]))
    assert not events.complete


# --- whose they are ------------------------------------------------------------------------------------
def request(number: int, ids: tuple[int, ...], finish: str = "length", out: int = 4) -> OpRecord:
    op = Operation(id=number, kind="generate", input_ids=ids, max_new_tokens=out, label=f"request {number}")
    reply = Reply(finish=finish, output_ids=[90 + number] * out)  # type: ignore[arg-type]
    return OpRecord(op=op, rid=f"r{number}", started=float(number), ended=number + 1.0, reply=reply)


def chain(tokens: tuple[int, ...], users: list[str], size: int = 2) -> list[StoredBlock]:
    blocks: list[StoredBlock] = []
    for at in range(0, len(tokens), size):
        blocks.append(StoredBlock(tokens[at : at + size], blocks[-1] if blocks else None, users))
    return blocks


REQUESTS = [request(1, (1, 2, 3, 4)), request(2, (1, 2, 5, 6), "abort"), request(3, (1, 2, 3, 4), "abort")]


def leak_of(kept: list[StoredBlock] | None, used: int = 4) -> Any:
    (found,) = judge_conservation(
        facts_of(REQUESTS, make_cell(page_size=2), idle=sample(gauges(used=used)), kept=kept)
    )
    return found


def test_the_owner_is_who_the_blocks_were_stored_for() -> None:
    assert leak_of(None).owner is None, "two aborted requests held as much"
    found = leak_of(chain((1, 2, 5, 6), ["r2"]))
    assert found.owner == "request 2"
    assert found.kind == "K03"
    assert any("2 of request 2, the last one to token 4" in text for text in found.evidence)


def test_of_two_users_the_one_that_was_aborted_is_meant() -> None:
    assert leak_of(chain((1, 2, 3, 4), ["r1", "r3"])).owner == "request 3"


def test_an_aborted_request_that_hit_another_ones_blocks_is_meant_too() -> None:
    assert leak_of(chain((1, 2, 3, 4), ["r1"])).owner == "request 3"


def test_without_names_the_tokens_tell() -> None:
    assert leak_of(chain((1, 2, 5, 6), [""])).owner == "request 2"
    assert leak_of(chain((1, 2, 3, 4, 91, 91), [""])).owner == "request 1"


def test_several_owners_are_named_those_with_the_most_first() -> None:
    shared = chain((1, 2, 3, 4, 93, 93), ["r3"])
    kept = [*shared, StoredBlock((5, 6), shared[0], ["r2"])]
    found = leak_of(kept, used=8)
    assert found.owner == "request 3; request 2"
    assert any("3 of request 3" in text and "1 of request 2" in text for text in found.evidence)


def test_preemptions_that_were_only_counted_are_suspected_beside_the_owner() -> None:
    facts = facts_of(
        [request(1, (1, 2, 3, 4))],
        make_cell(page_size=2),
        baseline=sample(retracted_total=0),
        idle=sample(gauges(used=4), retracted_total=9),
        kept=chain((1, 2, 3, 4), ["r1"]),
    )
    (found,) = judge_conservation(facts)
    assert (found.kind, found.owner) == ("K05", "request 1")


def test_a_block_of_nobody_names_nobody() -> None:
    assert leak_of([StoredBlock((), None, ["who"])]).owner is None


def test_no_kept_block_says_that_it_was_no_full_one() -> None:
    found = leak_of([])
    assert found.owner is None
    assert any("none of it is a full block" in text for text in found.evidence)


def test_blocks_that_are_missing_beside_the_kept_ones_are_counted() -> None:
    found = leak_of(chain((1, 2, 5, 6), ["r2"]), used=6)
    assert any("The other 1 that are missing" in text for text in found.evidence)
    assert not any("that are missing" in text for text in leak_of(chain((1, 2, 5, 6), ["r2"])).evidence)


def test_the_tokens_of_a_session_name_the_turn() -> None:
    def turn(number: int, ids: tuple[int, ...], finish: str, out: tuple[int, ...]) -> OpRecord:
        op = Operation(id=number, kind="turn", session="s", input_ids=ids, label=f"s turn {number}")
        reply = Reply(finish=finish, output_ids=list(out))  # type: ignore[arg-type]
        return OpRecord(op=op, rid=f"r{number}", started=float(number), ended=number + 0.5, reply=reply)

    turns = [turn(1, (1, 2), "length", (3, 4)), turn(2, (5, 6), "abort", ()), turn(3, (7, 8), "length", (9,))]
    kept = chain((1, 2, 3, 4, 5, 6), ["s"])
    (found,) = judge_conservation(
        facts_of(turns, make_cell(page_size=2), idle=sample(gauges(used=6)), kept=kept)
    )
    assert found.owner == "s turn 2"


def test_recorded_events_of_a_server_that_keeps_aborted_blocks() -> None:
    events, before, labels = BlockEvents(), {}, {}
    for line in RECORDED.read_bytes().splitlines():
        entry = msgspec.json.decode(line)
        if "mark" in entry:
            before, labels = events.book.snapshot(), entry["requests"]
        else:
            events.take(entry["number"], base64.b64decode(entry["payload"]))
    assert events.complete
    kept = [block for key, block in events.book.snapshot().items() if before.get(key) is block]
    assert len(before) > len(kept) == 6
    records = [
        OpRecord(op=Operation(id=number, kind="turn", label=label), rid=rid)
        for number, (rid, label) in enumerate(labels.items())
    ]
    owners, (text,) = kept_for(kept, records, frozenset(), lost=256)
    assert {record.op.label for record in owners} == {"r0-s0 aborted turn", "r0-s1 aborted turn"}
    assert "stored 6 full blocks" in text
    assert "The other 2 that are missing" in text


# --- the pool is overwritten ---------------------------------------------------------------------------
@pytest.mark.parametrize("page", [1, 32, 256])
def test_fresh_tokens_fill_all_that_may_be_overwritten(page: int) -> None:
    plan = overwrite_plan(make_cell(page_size=page, context_length=1024), 512, 7, room=16000)
    block = max(page, 64)
    assert sum(len(op.input_ids) // block * block for op in plan.operations) >= 16000
    assert len({op.input_ids[:block] for op in plan.operations}) == len(plan.operations)
    assert all(len(op.input_ids) + op.max_new_tokens < 1024 and not op.after for op in plan.operations)


@pytest.mark.parametrize("room", [0, 32, MOST_OVERWRITTEN + 1])
def test_too_small_and_too_large_a_pool_is_left_alone(room: int) -> None:
    assert overwrite_plan(make_cell(context_length=1024), 512, 7, room).operations == ()


# --- the socket ----------------------------------------------------------------------------------------
def test_a_listener_takes_what_a_publisher_that_connects_sends() -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed here")
    listener = vllm_events.Listener()
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    try:
        assert listener.endpoint.startswith("tcp://127.0.0.1:")
        assert listener.blocks() is None, "nothing came yet"
        publisher.connect(listener.endpoint)
        payload = msgspec.msgpack.encode([1.0, [stored([b"a"], None, [1, 2])], 0])
        deadline = time.monotonic() + 30
        while not listener.events.batches and time.monotonic() < deadline:
            publisher.send_multipart((b"", (0).to_bytes(8, "big"), payload))
            time.sleep(0.05)
        assert prefixes(listener.events) == [(1, 2)]
    finally:
        publisher.close(linger=0)
        context.term()
        listener.close()


def spec_of(tmp_path: Path, engine: VllmEngine, **given: Any) -> Any:
    one = cell(**given)
    engine.listen(one)
    try:
        return engine.launch_spec(LaunchInputs(one, 8000, "python", "cpu", "/models/llama", None, tmp_path))
    finally:
        engine.close()


def test_where_pyzmq_is_the_server_gets_the_endpoint_and_requests_their_names(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed here")
    spec = spec_of(tmp_path, VllmEngine())
    config = msgspec.json.decode(spec.argv[spec.argv.index("--kv-events-config") + 1])
    assert config["enable_kv_cache_events"] is True
    assert config["endpoint"].startswith("tcp://127.0.0.1:")
    engine = VllmEngine()
    engine.version = "0.32.0"
    engine.listen(cell())
    assert engine.request_call(operation(), "rid", None, []).json["session_id"] == "rid"
    engine.close()
    engine.close()
    assert "session_id" not in engine.request_call(operation(), "rid", None, []).json


def test_without_pyzmq_there_are_no_events_and_the_notes_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_events, "listen", lambda: None)
    spec = spec_of(tmp_path, VllmEngine())
    assert "--kv-events-config" not in spec.argv
    assert any("pyzmq" in note for note in spec.notes)
    assert VllmEngine().stored_blocks() is None


@pytest.mark.parametrize("given", [{"args": {"kv-events-config": None}}, {"prefix_cache": False}])
def test_a_cell_can_switch_events_off(tmp_path: Path, given: dict[str, Any]) -> None:
    spec = spec_of(tmp_path, VllmEngine(), **given)
    assert "--kv-events-config" not in spec.argv
    assert not any("KV events" in note for note in spec.notes)
