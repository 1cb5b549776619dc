"""How late this process's own event loop is, so that a starved client is never taken for a slow server."""

from __future__ import annotations

import asyncio
from types import TracebackType

from pytest_kvcheck.trace import Clock

PERIOD = 0.05


class LagMonitor:
    """Sleeps ``PERIOD`` seconds over and over and keeps how late each waking was, in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late: list[tuple[float, float]] = []
        self._due = clock.now() + PERIOD
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMonitor:
        self._task = asyncio.create_task(self._watch(), name="kvcheck-lag")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self._due = self._clock.now() + PERIOD
            await asyncio.sleep(PERIOD)
            now = self._clock.now()
            self._late.append((now, max(0.0, now - self._due)))

    def worst(self, since: float = 0.0) -> float:
        """The greatest lateness since then, the waking that is overdue right now included."""
        worst = max(0.0, self._clock.now() - self._due)
        for when, late in reversed(self._late):
            if when < since:
                break
            worst = max(worst, late)
        return worst
