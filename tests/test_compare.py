"""Two servers' scorings of one trace's histories: what is noise, what is a difference."""

from __future__ import annotations

import random
from collections.abc import Callable

from pytest_kvcheck.compare import compare_scores
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import OpRecord, Reply

Value = Callable[[int, int], float]


def history(number: int, length: int = 30) -> OpRecord:
    rng = random.Random(number)
    ids = tuple(rng.randrange(500) for _ in range(length))
    op = Operation(id=number, kind="generate", input_ids=ids[:-6], max_new_tokens=6, label=f"request {number}")
    return OpRecord(op=op, reply=Reply(finish="length", output_ids=list(ids[-6:])))


def scores(records: list[OpRecord], value: Value) -> list[OpRecord]:
    """A server that gives ``value(history, position)``."""
    out = []
    for record in records:
        ids = (*record.op.input_ids, *record.reply.output_ids)
        values = [None, *(value(record.op.id, position) for position in range(1, len(ids)))]
        reply = Reply(finish="length", output_ids=[1], input_logprobs=values)
        out.append(OpRecord(op=Operation(id=0, kind="score", input_ids=ids), phase="replay", reply=reply))
    return out


RECORDS = [history(number) for number in range(12)]


def exact(number: int, position: int) -> float:
    return -1.0 - (number * 31 + position * 7) % 13 / 4


def near(number: int, position: int) -> float:
    return exact(number, position) + random.Random(f"{number}/{position}").uniform(-0.03, 0.03)


def test_noise_is_no_difference() -> None:
    found = compare_scores(RECORDS, scores(RECORDS, exact), scores(RECORDS, near))
    assert found.agrees
    assert found.histories == len(RECORDS)
    assert 0.01 < found.noise.greatest <= 0.03


def test_equal_servers_agree() -> None:
    assert compare_scores(RECORDS, scores(RECORDS, exact), scores(RECORDS, exact)).agrees


def test_one_wrong_history_is_named_with_its_place() -> None:
    def wrong(number: int, position: int) -> float:
        return near(number, position) - (2.0 if number == 5 and position >= 20 else 0.0)

    found = compare_scores(RECORDS, scores(RECORDS, exact), scores(RECORDS, wrong))
    assert not found.agrees
    assert found.same_model
    assert [one.label for one in found.differences] == ["request 5"]
    assert found.differences[0].position >= 20
    assert "request 5" in found.text()


def test_a_history_that_is_a_little_wrong_all_along_is_found() -> None:
    def coarse(number: int, position: int) -> float:
        bulge = 0.2 if position % 9 == 0 else 0.02
        return exact(number, position) + random.Random(f"{number}/{position}").uniform(-bulge, bulge)

    def wrong(number: int, position: int) -> float:
        return coarse(number, position) - (0.6 if number == 5 else 0.0)

    assert compare_scores(RECORDS, scores(RECORDS, exact), scores(RECORDS, coarse)).agrees
    found = compare_scores(RECORDS, scores(RECORDS, exact), scores(RECORDS, wrong))
    assert [one.label for one in found.differences] == ["request 5"]


def test_other_weights_are_not_blamed_on_a_history() -> None:
    found = compare_scores(RECORDS, scores(RECORDS, exact), scores(RECORDS, lambda n, p: exact(p, n)))
    assert not found.same_model
    assert not found.agrees
    assert "same model" in found.text()


def test_nothing_to_compare_is_no_agreement() -> None:
    found = compare_scores(RECORDS, scores(RECORDS, exact), [])
    assert not found.agrees
    assert "none could be compared" in found.text()
