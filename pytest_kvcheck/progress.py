"""Live progress: workers append lines to one file, the process that reports prints them.

pytest-xdist gives a worker no channel to the controller but reports, and a report comes only when a case has
ended; a server that takes a minute to start should be seen before that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


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
