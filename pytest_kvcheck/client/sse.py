"""Server-sent events: bytes in, the data of whole events out. Framing only; what data means is the engine's."""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class SseDecoder:
    """Decodes a stream that may be cut into chunks anywhere, even inside a line end or a character.

    Follows the WHATWG rules: a line ends with LF, CR or CRLF, an event with an empty line; data lines of one
    event are joined by LF; comments and fields other than ``data`` are dropped, as is an event without data.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._first_line = True

    @property
    def pending(self) -> int:
        """How many bytes stand in an event that has not ended. Not 0 at the end of a stream: it was cut."""
        return len(self._tail) + sum(map(len, self._data)) + len(self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that this chunk completes, in order."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        # For bytes, splitlines knows LF, CR and CRLF and nothing else: just the line ends of the format.
        lines = (self._tail + chunk).splitlines(keepends=True)
        self._tail = lines.pop() if lines and lines[-1][-1:] not in b"\r\n" else b""
        events: list[bytes] = []
        for line in lines:
            self._line(line.rstrip(b"\r\n"), events)
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if self._first_line:
            line = line.removeprefix(_BOM)
            self._first_line = False
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
