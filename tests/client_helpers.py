"""The smallest engine adapter that the fake server needs, and short cuts for running plans against it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_kvcheck.cells import Cell, Features, Model, Position
from pytest_kvcheck.client.calls import Call
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import Finish, OpRecord, Reply
from pytest_kvcheck.workloads.plan import open_sessions


class FakeParser:
    def __init__(self) -> None:
        self.shown = 0
        self.last: dict[str, Any] = {}
        self.faults: list[str] = []

    def feed(self, data: bytes) -> None:
        try:
            self.last = json.loads(data)
        except ValueError:
            self.faults.append(f"expected JSON, found {data[:30]!r}")
            return
        self.shown = len(self.last.get("output_ids", []))

    def finish(self, http_status: int | None, error: str = "", complete: bool = True) -> Reply:
        meta = self.last.get("meta_info", {})
        reason = (meta.get("finish_reason") or {}).get("type")
        finish: Finish = "error"
        if http_status is not None and 400 <= http_status < 500:
            finish = "rejected"
        elif not error and reason in ("length", "abort"):
            finish = reason
        if http_status is None or http_status >= 400:
            self.faults = []
        message = error or self.last.get("error", {}).get("message", "")
        probs = [each[0] for each in meta.get("output_token_logprobs", [])]
        if any(math.isnan(prob) for prob in probs):
            self.faults.append("log-prob is NaN")
        return Reply(
            http_status=http_status,
            finish=finish,
            message=message,
            output_ids=self.last.get("output_ids", []),
            output_logprobs=probs or None,
            prompt_tokens=meta.get("prompt_tokens"),
            cached_tokens=meta.get("cached_tokens"),
            faults=self.faults,
        )


class FakeEngine:
    """Speaks to :class:`fake_server.FakeServer`. ``can_abort`` False: as an engine without an abort call."""

    def __init__(self, can_abort: bool = True) -> None:
        self.can_abort = can_abort

    def open_call(self, op: Operation, session_id: str) -> Call | None:
        return Call("POST", "/open_session", {"session_id": session_id, "timeout": op.timeout})

    def close_call(self, session_id: str) -> Call | None:
        return Call("POST", "/close_session", {"session_id": session_id})

    def request_call(self, op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call:
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(op.input_ids),
            "stream": op.stream,
            "sampling_params": {"max_new_tokens": op.max_new_tokens},
        }
        if session_id is not None:
            body["session_params"] = {"id": session_id}
            if op.invalid == "offset":
                body["session_params"]["offset"] = 1
        return Call("POST", "/generate", body)

    def reply_parser(self, op: Operation, history: int) -> FakeParser:
        return FakeParser()

    def abort_call(self, rid: str | None) -> Call | None:
        if not self.can_abort:
            return None
        return Call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def flush_call(self) -> Call:
        return Call("POST", "/flush_cache")


def cell(**features: Any) -> Cell:
    """A cell of the reference engine with these features."""
    return Cell("cell", "llama", "reference", Model("model"), Features(**features), Position("m.yaml", 1, 1))


def drain(records: Iterable[OpRecord]) -> tuple[Operation, ...]:
    """The closes of every session that these records leave open."""
    seen = list(records)
    first = 1 + max((record.op.id for record in seen), default=-1)
    return tuple(
        Operation(id=first + at, kind="close", session=name, label=f"{name} drain")
        for at, name in enumerate(open_sessions(seen))
    )
