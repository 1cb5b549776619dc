"""What stands between a client and an engine's protocol: a call to make, and a parser for what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import Reply


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call. ``json`` None sends no body."""

    method: Literal["GET", "POST"]
    path: str
    json: Any = None


class ReplyParser(Protocol):
    """Turns what arrives for one request into a :class:`Reply`. Never raises: errors become faults."""

    @property
    def shown(self) -> int:
        """How many output tokens the client has seen so far."""

    def feed(self, data: bytes) -> None:
        """One server-sent event's data, or the whole body of a reply that was not streamed."""

    def finish(self, http_status: int | None, error: str = "", complete: bool = True) -> Reply:
        """The reply. ``complete`` False: the stream ended without the engine's end mark."""


class Protocols(Protocol):
    """The half of an engine adapter that a client of a running server needs (see ``engines/base.py``)."""

    def open_call(self, op: Operation, session_id: str) -> Call | None: ...

    def close_call(self, session_id: str) -> Call | None: ...

    def request_call(self, op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call: ...

    def reply_parser(self, op: Operation, history: int) -> ReplyParser: ...

    def abort_call(self, rid: str | None) -> Call | None: ...

    def flush_call(self) -> Call: ...
