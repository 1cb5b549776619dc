"""The error of a server that could not be started, found or kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class LaunchError(Exception):
    """One paragraph for a person (expected, found, where, next step), then the end of the server's log.

    ``exit_status`` is the engine's own (negative: the signal that killed it), None where it did not end.
    """

    def __init__(
        self,
        paragraph: str,
        *,
        tail: Sequence[str] = (),
        log_path: Path | None = None,
        exit_status: int | None = None,
    ) -> None:
        self.paragraph = paragraph
        self.tail = tuple(tail)
        self.log_path = log_path
        self.exit_status = exit_status
        where = [f"Full log: {log_path}"] if log_path else []
        head = "The log's only line:" if len(self.tail) == 1 else f"The last {len(self.tail)} lines of the log:"
        lines = [head, *(f"  | {line}" for line in self.tail)]
        super().__init__("\n".join([paragraph, *where, *(lines if self.tail else [])]))
