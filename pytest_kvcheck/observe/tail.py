"""Follows an engine's log from its first byte and keeps what the engine's rules name."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_kvcheck.observe.logs import LogEvent, LogRule, match_line

CHUNK = 1 << 16
MAX_LINE = 1 << 15  # bytes of one line that are read; engines print whole prompts at debug level
MAX_EVENTS = 200_000


class LogTail:
    """A thread that reads what is appended to ``path`` (it need not exist yet).

    ``clock`` dates the events. ``skip_existing``: lines that are there already are counted, but not matched
    (a server that we attach to). Lines count from 1 as in an editor; a carriage return (progress bars) starts a
    new text in the same line. Bytes that are no UTF-8 become the replacement character.
    """

    def __init__(
        self,
        path: Path,
        rules: Sequence[LogRule],
        clock: Callable[[], float] = time.monotonic,
        *,
        tail_lines: int = 400,
        interval: float = 0.05,
        skip_existing: bool = False,
    ) -> None:
        self.path = path
        self.dropped = 0
        self._rules = tuple(rules)
        self._clock = clock
        self._interval = interval
        self._events: list[LogEvent] = []
        self._first_fatal: LogEvent | None = None
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._partial = b""
        self._offset = 0  # bytes read
        self._position = 0  # bytes of them that have been cut into lines
        self._line = 0
        self._muted_until = path.stat().st_size if skip_existing and path.exists() else 0
        self._read = threading.Condition()
        self._closing = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"kvcheck-log-{path.name}", daemon=True)
        self._thread.start()

    def events(self, since_line: int = 0) -> list[LogEvent]:
        """Events of lines after ``since_line``, in log order."""
        with self._read:
            return [event for event in self._events if event.line > since_line]

    def first_fatal(self) -> LogEvent | None:
        """The first line that says that the engine is going down."""
        with self._read:
            return self._first_fatal

    def tail(self, lines: int) -> list[str]:
        """The last lines, the oldest first."""
        with self._read:
            return list(self._tail)[-lines:] if lines > 0 else []

    @property
    def line(self) -> int:
        """How many lines have been read: the ``since_line`` of what comes next."""
        with self._read:
            return self._line

    def drain(self, timeout: float = 5.0, *, final: bool = False) -> bool:
        """Wait until everything that is in the file now has been read; returns whether that was reached.

        ``final``: the writer is gone, so a last line without an end counts as a line.
        """
        size = self._size()
        deadline = time.monotonic() + timeout
        with self._read:
            while self._offset < size:
                self._wanted.set()
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._read.wait(min(left, 0.2))
            if final:
                self._end_of_partial()
        return True

    def close(self) -> None:
        """Read what is left and end the thread; what was read stays available."""
        self._closing.set()
        self._wanted.set()
        self._thread.join(10.0)
        with self._read:
            self._end_of_partial()

    def _follow(self) -> None:
        file = None
        try:
            while True:
                closing = self._closing.is_set()  # before the read: what was written before close() is read
                if file is None and self.path.exists():
                    file = self.path.open("rb", buffering=0)
                while file is not None and (data := file.read(CHUNK)):
                    with self._read:
                        self._take(data)
                        self._read.notify_all()
                if closing:
                    return
                self._wanted.wait(self._interval)
                self._wanted.clear()
        finally:
            if file is not None:
                file.close()

    def _take(self, data: bytes) -> None:
        self._offset += len(data)
        first, *rest = data.split(b"\n")
        self._grow(first)
        for piece in rest:
            self._position += 1
            self._end_of_line()
            self._grow(piece)

    def _grow(self, piece: bytes) -> None:
        self._position += len(piece)
        room = MAX_LINE - len(self._partial)
        self._partial += piece[:room]

    def _end_of_partial(self) -> None:
        if self._partial:
            self._end_of_line()

    def _end_of_line(self) -> None:
        raw, self._partial = self._partial, b""
        self._line += 1
        texts = [part for part in raw.decode("utf-8", errors="replace").split("\r") if part]
        self._tail.append(texts[-1] if texts else "")
        if self._position <= self._muted_until:
            return
        for text in texts:
            for event in match_line(self._rules, text, self._line, self._clock()):
                self._events.append(event)
                if event.meaning == "fatal" and self._first_fatal is None:
                    self._first_fatal = event
        if len(self._events) > MAX_EVENTS:
            self._forget()

    def _forget(self) -> None:
        """Drop the older half of what only explains; what accuses is kept."""
        old, new = self._events[: MAX_EVENTS // 2], self._events[MAX_EVENTS // 2 :]
        kept = [event for event in old if event.meaning in ("leak", "fatal", "warning")]
        self.dropped += len(old) - len(kept)
        self._events = kept + new

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
