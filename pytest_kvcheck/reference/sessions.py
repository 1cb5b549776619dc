"""Streaming sessions: the server keeps the history and its KV between turns; a turn sends only what is new.

Between turns a session owns its :class:`Holding`; while a turn runs it lends it to the request. Only a turn
that finished advances the history.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .faults import Faults
from .pools import Holding

if TYPE_CHECKING:
    from .batch import Request

log = logging.getLogger("kvcheck.reference")


class SessionError(Exception):
    """What a client asked of sessions cannot be done; the message says why."""


@dataclass(eq=False)
class Session:
    """``tokens`` is the visible history; ``holding`` its KV, or None before the first finished turn."""

    id: str
    timeout: float | None
    last_active: float
    tokens: list[int] = field(default_factory=list)
    holding: Holding | None = None
    turn: Request | None = None
    closing: bool = False

    @property
    def held(self) -> Holding | None:
        """The holding while no turn runs on it."""
        return None if self.turn is not None and self.turn.holding is self.holding else self.holding


class Sessions:
    """All open sessions. ``release`` gives a holding back to the pools."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.by_id: dict[str, Session] = {}

    def open(self, session_id: str | None, timeout: float | None, now: float) -> str:
        """Open a session and return its id. Raises :class:`SessionError` for an id that is open."""
        session_id = session_id or uuid.uuid4().hex
        if session_id in self.by_id:
            log.warning("session id %s already exist, cannot open.", session_id)
            raise SessionError(f"session id {session_id} already exists")
        self.by_id[session_id] = Session(session_id, timeout, now)
        log.info("Session opened: %s (active=%d)", session_id, len(self.by_id))
        return session_id

    def close(self, session_id: str) -> list[Holding]:
        """Close a session, at once or when its turn ends. Returns what must be released now."""
        session = self.by_id.get(session_id)
        if session is None:
            return []
        if session.turn is not None:
            log.info("Deferring session close for %s: a request is in flight", session_id)
            session.closing = True
            return []
        return self._drop(session, "Session closed: %s")

    def reap(self, now: float) -> list[Holding]:
        """Drop the sessions that timed out while idle. Returns what must be released."""
        stale = [
            session
            for session in self.by_id.values()
            if session.turn is None
            and session.timeout is not None
            and now - session.last_active > session.timeout
        ]
        dropped = [
            holding for session in stale for holding in self._drop(session, "Session %s timed out, closing.")
        ]
        return [] if self.faults.on("session-timeout-leak") else dropped

    def end_turn(self, session: Session) -> list[Holding]:
        """The turn ended, whatever its end. Returns what must be released now: a deferred close."""
        session.turn = None
        if not session.closing:
            return []
        dropped = self._drop(session, "Deferred close ready for session %s")
        return [] if self.faults.on("close-in-flight-leak") else dropped

    def held(self) -> Iterator[Holding]:
        """What idle sessions hold."""
        for session in self.by_id.values():
            holding = session.holding if self.faults.on("lent-slot-double-count") else session.held
            if holding is not None:
                yield holding

    def _drop(self, session: Session, message: str) -> list[Holding]:
        del self.by_id[session.id]
        log.info(message, session.id)
        if session.holding is None:
            return []
        freed = session.holding.allocated - session.holding.protected
        log.info("Session KV released: %s (%d tokens freed)", session.id, freed)
        return [session.holding]
