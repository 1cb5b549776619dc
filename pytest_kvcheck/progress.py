"""Live progress: workers append lines to one file, the process that reports prints them.

pytest-xdist gives a worker no channel to the controller but reports, and a report comes only when a case has
ended; a server that takes a minute to start should be seen before that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


class ProgressWriter:
    """Appends lines to ``path``; single small appends of several processes do not mix."""

    def __init__(self, path: Path, who: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._who = who

    def __call__(self, text: str) -> None:
        os.write(self._file, f"{self._who}{' '.join(text.split())}\n".encode())

    def close(self) -> None:
        os.close(self._file)


class ProgressReader:
    """Follows ``path`` from its present end in a thread and gives each new line to ``show``."""

    def __init__(self, path: Path, show: Callable[[str], None], interval: float = 0.3) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        self._path, self._show, self._interval = path, show, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvcheck-progress", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with self._path.open(encoding="utf-8", errors="replace") as lines:
            part = ""
            while True:
                last_round = self._stop.is_set()
                for piece in lines:
                    part += piece
                    if part.endswith("\n"):
                        self._show(part.rstrip("\n"))
                        part = ""
                if last_round:
                    return
                self._stop.wait(self._interval)

    def close(self) -> None:
        """Show what has been written so far and end the thread."""
        self._stop.set()
        self._thread.join(timeout=5)


class Screen:
    """Writes whole lines to the terminal while a test runs.

    Then descriptor 1 leads into pytest's capture, so the real one is kept from before the first test.
    """

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._out: TextIO | None = None
        try:
            real = os.dup(reporter._tw._file.fileno())
            self._out = os.fdopen(real, "w", encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return  # a terminal that is no file, as in pytest's own tests: nothing is shown

    def show(self, text: str) -> None:
        if self._out is None:
            return
        # -2 is the reporter's own word for "at the start of a line": it prints the test's name again.
        begun, self._reporter.currentfspath = self._reporter.currentfspath, -2
        self._out.write(("" if begun in (-2, None) else "\n") + f"kvcheck: {text}\n")
        self._out.flush()

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None
