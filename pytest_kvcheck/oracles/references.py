"""Pairs what a request said with one-shot scorings of exactly the tokens that the client saw.

The scorings are found by their token ids, never by labels: every ``score`` whose input starts with a request's
visible history, prompt and output is a reference for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec.structs import replace

from pytest_kvcheck.ledger import SessionLedger
from pytest_kvcheck.trace import FINISHED, OpRecord

Ids = tuple[int, ...]
Item = TypeVar("Item")
# Enough leading ids to tell the inputs of one case apart; the whole prefix is compared after that.
KEY = 12


@dataclass(frozen=True, slots=True)
class Emitted:
    """One request with every token id that stood before its output. ``history`` of these were the session's."""

    record: OpRecord
    history: int
    prompt: Ids
    output: Ids

    @property
    def ids(self) -> Ids:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Place:
    """One token: its ``position`` in the visible ids, what the request said and what the reference says.

    ``top`` is the greatest log-prob that the reference gives at this position, None where it does not tell.
    ``observed`` is None where the request returned no log-probs (then only ``top`` can be judged).
    """

    position: int
    observed: float | None
    reference: float
    top: float | None


def emitted(records: Iterable[OpRecord]) -> Iterator[Emitted]:
    """Every turn and plain request that showed tokens, with the ids that the client knows stood before them;
    each answer of a request that got several, as a record of its own.

    Turns whose history the client cannot know are left out: after a mismatch of ``prompt_tokens`` (the session
    arithmetic's finding), or after a turn that the server may have finished behind a closed socket.
    """
    ledgers: dict[str, SessionLedger] = {}
    for record in records:
        op = record.op
        if op.kind == "generate":
            for reply in (record.reply, *record.reply.samples):
                if reply.output_ids:
                    one = record if reply is record.reply else replace(record, reply=reply)
                    yield Emitted(one, 0, op.input_ids, tuple(reply.output_ids))
        elif op.session is not None:
            ledger = ledgers.setdefault(op.session, SessionLedger(op.session))
            prompt = (*ledger.history, *op.input_ids)
            agreed = record.reply.prompt_tokens in (None, len(prompt))
            if (
                op.kind == "turn"
                and record.reply.output_ids
                and agreed
                and record.history == len(ledger.history)
            ):
                yield Emitted(record, len(ledger.history), prompt, tuple(record.reply.output_ids))
            ledger.apply(record)


class ByPrefix(Generic[Item]):
    """Things by the token ids that they begin with."""

    def __init__(self) -> None:
        self._by_start: dict[Ids, list[tuple[Ids, Item]]] = {}

    def add(self, ids: Ids, item: Item) -> None:
        self._by_start.setdefault(ids[:KEY], []).append((ids, item))

    def of(self, ids: Ids) -> list[Item]:
        """What begins with all of ``ids``, in the order in which it was added."""
        if len(ids) >= KEY:
            near = self._by_start.get(ids[:KEY], [])
        else:
            near = [one for start, some in self._by_start.items() if start[: len(ids)] == ids for one in some]
        return [item for whole, item in near if whole[: len(ids)] == ids]


class References(ByPrefix[OpRecord]):
    """The usable scorings of a case."""

    def __init__(self, records: Iterable[OpRecord]) -> None:
        super().__init__()
        self.count = 0
        for record in records:
            if record.op.kind == "score" and usable(record):
                self.add(record.op.input_ids, record)
                self.count += 1


def usable(score: OpRecord) -> bool:
    return score.reply.finish in FINISHED and bool(score.reply.input_logprobs)


def at(values: list[float | None] | None, start: int, position: int) -> float | None:
    """The finite value for ``position`` in a list whose first entry stands at ``start``, or None."""
    place = position - start
    if values is None or not 0 <= place < len(values):
        return None
    value = values[place]
    return value if value is not None and math.isfinite(value) else None


def compare(one: Emitted, score: OpRecord) -> list[Place]:
    """The request's output tokens, and the input tokens that it was asked to score, beside a reference.

    The first input entry is passed over: it belongs to a hidden state that the request did not compute itself.
    """
    reply, places = one.record.reply, []
    reference = score.reply
    own_input = reply.input_logprobs or []
    positions = range(len(one.prompt), len(one.ids))
    inputs = range(reply.input_start + 1, min(len(one.prompt), reply.input_start + len(own_input)))
    for position in (*inputs, *positions):
        expected = at(reference.input_logprobs, reference.input_start, position)
        if expected is None:
            continue
        if position < len(one.prompt):
            observed, top = at(own_input, reply.input_start, position), None
            if observed is None:
                continue
        else:
            observed = at(reply.output_logprobs, len(one.prompt), position)
            top = at(reference.top_logprobs, reference.input_start, position)
        places.append(Place(position, observed, expected, top))
    return places


def deltas(places: Iterable[Place]) -> list[float]:
    """Observed less reference of the places that have both."""
    return [place.observed - place.reference for place in places if place.observed is not None]


def gaps(places: Iterable[Place]) -> list[float]:
    """How far each greedily chosen token stands below the best one by the reference."""
    return [place.top - place.reference for place in places if place.top is not None]
