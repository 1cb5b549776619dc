"""What the trace says of each session: its history, and whether it is still open."""

from __future__ import annotations

from pytest_kvcheck.ledger import sessions
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import OpRecord, Reply
from pytest_kvcheck.workloads.plan import open_sessions


def _record(kind: str, finish: str, **fields: object) -> OpRecord:
    op = Operation(id=0, kind=kind, session="s", input_ids=(11, 12) if kind == "turn" else ())  # type: ignore[arg-type]
    return OpRecord(op=op, reply=Reply(finish=finish, **fields))  # type: ignore[arg-type]


def test_only_a_finished_turn_is_history() -> None:
    records = [
        _record("open", "stop"),
        _record("turn", "length", output_ids=[13]),
        _record("turn", "abort", output_ids=[14]),
    ]
    assert sessions(records)["s"].history == [11, 12, 13]


def test_a_close_that_was_not_sent_leaves_the_session_open() -> None:
    """Else nobody closes it when the case ends, and what it holds is called a leak."""
    opened = _record("open", "stop")
    assert open_sessions([opened, _record("close", "timeout", message="not sent: the server is stuck")]) == [
        "s"
    ]
    assert open_sessions([opened, _record("close", "error")]) == ["s"]
    assert open_sessions([opened, _record("close", "stop")]) == []
