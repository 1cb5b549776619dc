"""Repeats a call while a workload runs, for engines that must be told by request what others do by a flag."""

from __future__ import annotations

import threading
from types import TracebackType

from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines.base import Call

# Pauses grow, so that a server that is slow to make up for what it was told gets on in between. The first are
# short: a whole plan may take a second, and half of the calls come when none runs.
FIRST_PAUSE, GROWTH, LONGEST_PAUSE = 0.02, 1.4, 5.0


class Provoker:
    """A context manager that sends ``call`` again and again from a thread of its own; None sends nothing.

    Nothing here raises: what the server answers shows in its own account.
    """

    def __init__(self, base_url: str, call: Call | None) -> None:
        self.sent = 0
        self._base_url = base_url
        self._call = call
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcheck-provoke", daemon=True)

    def __enter__(self) -> Provoker:
        if self._call is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(15.0)

    def _run(self) -> None:
        assert self._call is not None
        control, pause = Control(self._base_url), FIRST_PAUSE
        while not self._stopping.wait(pause):
            control.call(self._call.method, self._call.path, self._call.json)
            self.sent += 1
            pause = min(pause * GROWTH, LONGEST_PAUSE)
        control.close()
