"""Which pairs of operations a plan brought together: one beside the other, or one behind it in a session.

Faults of accounting sit where two things meet, so pairs are what a fuzzer's coverage is counted in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.oracles.common import closed_in_flight, overlapping, requests
from pytest_kvcheck.trace import OpRecord

Pair = tuple[str, str, str]
ENDS = ("aborted", "left", "refused", "closed", "retracted", "long")


def pair_counts(facts: CaseFacts) -> dict[str, int]:
    """``operation_pairs`` and how many there could be, for ``CaseFacts.exercised``."""
    return {"operation_pairs": len(covered(facts)), "operation_pairs_possible": len(possible(facts.cell))}


def possible(cell: Cell) -> set[Pair]:
    """Every pair that this cell can show."""
    features = cell.features
    lacking = {
        *(("retracted",) if features.retract is None else ()),
        *(("long",) if features.chunked_prefill is None else ()),
    }
    ends = ["", *(end for end in ENDS if end not in lacking)]
    turns = [_name("turn", end) for end in ends]
    plains = [_name("generate", end) for end in ends if end not in ("refused", "closed")]
    # Behind a turn that was closed comes nothing, and behind one that was left only the close is sure.
    before = ["open", *(turn for turn in turns if turn not in ("turn closed", "turn left"))]
    chained = {("then", one, two) for one, two in itertools.product(before, [*turns, "close"])}
    beside = {_beside(*two) for two in itertools.combinations_with_replacement([*turns, *plains], 2)}
    return chained | {("then", "turn left", "close")} | beside


def covered(facts: CaseFacts) -> set[Pair]:
    """The possible pairs that the workload's records show."""
    records = sorted(facts.of_phase("workload"), key=lambda record: record.started_seq)
    closed = {record.op.id for record in closed_in_flight(facts)}
    chunk = facts.cell.features.chunked_prefill
    names = {record.op.id: _class(record, closed, chunk) for record in records}
    found: set[Pair] = set()
    last: dict[str, str] = {}
    for record in records:
        session, name = record.op.session, names[record.op.id]
        if session is None or (record.op.kind == "close" and record.op.target is not None):
            continue
        if session in last:
            found.add(("then", last[session], name))
        last[session] = name
    asked = requests(records)
    for record in asked:
        found |= {_beside(names[record.op.id], names[other.op.id]) for other in overlapping(record, asked)}
    return found & possible(facts.cell)


def _beside(one: str, two: str) -> Pair:
    return ("beside", *sorted((one, two)))  # type: ignore[return-value]


def _name(kind: str, end: str) -> str:
    return f"{kind} {end}".strip()


def _class(record: OpRecord, closed: Iterable[int], chunk: int | None) -> str:
    """What an operation is called by its kind and its end."""
    op, reply = record.op, record.reply
    if not op.generates:
        return op.kind
    ends = {
        "closed": op.id in closed,
        "aborted": reply.finish == "abort",
        "left": reply.finish == "disconnected",
        "refused": reply.finish == "rejected",
        "retracted": bool(reply.retractions),
        "long": chunk is not None and len(op.input_ids) > chunk,
    }
    return _name(op.kind, next((end for end, is_so in ends.items() if is_so), ""))
