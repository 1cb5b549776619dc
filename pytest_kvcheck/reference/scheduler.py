"""The scheduler: runs batch after batch and acts on results, one iteration late where scheduling is overlapped.

With overlap a batch is planned and launched before the *previous* batch's results are read, so each is planned
without knowing what the one before it gave. :meth:`Scheduler.step` is one iteration and needs no thread;
:meth:`Scheduler.run_forever` is the server's loop.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from .batch import Request, Result
from .cache import KVCache
from .decoding import Decoding
from .executor import Executor
from .faults import Faults
from .memcheck import MemoryCheck
from .plan import Limits, Planner

log = logging.getLogger("kvcheck.reference")
T = TypeVar("T")

# Positions kept free of prompt at the end of the context, as SGLang does.
INPUT_MARGIN = 5


class Rejected(Exception):
    """A request that the engine refuses; nothing of it was kept."""


# A request, how many output tokens are to be told, and how it ended (None: it goes on).
Update = tuple[Request, int, dict[str, Any] | None]


class Scheduler:
    """``tell`` gets the iteration's updates, in this scheduler's thread."""

    def __init__(
        self,
        cache: KVCache,
        executor: Executor,
        decoding: Decoding,
        limits: Limits,
        faults: Faults,
        tell: Callable[[list[Update]], None],
        silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache, self.executor, self.decoding, self.faults = cache, executor, decoding, faults
        self.sessions, self.tell, self.clock, self.overlap = cache.sessions, tell, clock, limits.overlap
        self.plan = Planner(cache, decoding, limits, self._abort)
        self.check = MemoryCheck(cache, self.plan.live, silent)
        pools = [cache.memory.full] if cache.memory.swa is None else [cache.memory.full, cache.memory.swa]
        self.max_length = min(limits.context, *(pool.total for pool in pools)) - 1
        self.max_input = self.max_length - INPUT_MARGIN
        self.in_flight: deque[Result] = deque()
        self.changed: dict[Request, None] = {}
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.aborted_total = self.prompt_total = self.generated_total = self.cached_total = 0
        self.progress = clock()
        self._rest = False
        self._stuck = False
        self._reaped = 0.0
        self._stop = False

    # --- from other threads ----------------------------------------------------------------------
    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` between two iterations."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.inbox.put(run)
        return future

    def run_forever(self) -> None:
        """Iterate until :meth:`stop`; a fault of the engine ends the process, as SGLang's does."""
        try:
            while not self._stop:
                if not self.step():
                    self._wait()
        except Exception:
            log.error("Scheduler hit an exception: %s", traceback.format_exc())
            log.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(131)

    def stop(self) -> None:
        def halt() -> None:
            self._stop = True

        self.inbox.put(halt)

    def _wait(self) -> None:
        """Nothing to do: sleep until something arrives or sessions may have timed out."""
        try:
            self.inbox.get(timeout=1.0 if self.idle else 0.01)()
            self._rest = False
        except queue.Empty:
            return

    # --- commands, between two iterations --------------------------------------------------------
    def submit(self, request: Request, session_id: str | None = None) -> None:
        """Queue a request; its prompt is what is new. Raises :class:`Rejected`."""
        if session_id is not None:
            session = self.sessions.by_id.get(session_id)
            if session is None or session.closing:
                raise Rejected(f"Invalid request: session id {session_id} does not exist")
            if session.turn is not None:
                if self.faults.on("refusal-frees-session"):
                    session.turn = None
                raise Rejected("Streaming session already has an active request.")
            if request.refused is not None:
                raise Rejected(request.refused)
            request.prompt = session.tokens + request.prompt
            request.session, request.input_start = session, -1
        if len(request.prompt) > self.max_input:
            raise Rejected(
                f"Input length ({len(request.prompt)} tokens) exceeds the maximum allowed length "
                f"({self.max_input} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
        room = self.max_length - len(request.prompt) - 1
        if request.sampling.max_new > room:
            request.sampling = replace(request.sampling, max_new=room)
        if request.session is not None:
            request.session.turn = request
            request.session.last_active = self.clock()
        self.plan.waiting.append(request)

    def abort(self, rid: str, everything: bool = False) -> int:
        """Abort the requests whose id begins with ``rid``; returns how many."""
        found = [r for r in self.plan.live() if everything or (rid and r.rid.startswith(rid))]
        for request in found:
            self._abort(request, "Aborted")
        return len(found)

    def abort_one(self, request: Request) -> None:
        """Abort one request if it was queued and has not ended: its client went away."""
        if request.finish is None and request in self.plan.live():
            self._abort(request, "Aborted")

    def open_session(self, session_id: str | None, timeout: float | None) -> str:
        """Returns the session's id. Raises ``SessionError`` for an id that is open."""
        return self.sessions.open(session_id, timeout, self.clock())

    def close_session(self, session_id: str) -> None:
        for holding in self.sessions.close(session_id):
            self.cache.release(holding)

    def flush(self) -> bool:
        """Forget all cached KV; False while requests run or wait."""
        if not self.idle:
            log.info("Cache not flushed because there are pending requests.")
            return False
        self.cache.clear()
        log.info("Cache flushed successfully!")
        return True

    # --- one iteration ---------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        plan = self.plan
        return not (plan.waiting or plan.running or plan.chunked or self.in_flight)

    def step(self) -> bool:
        """One iteration; False where there was nothing to do."""
        self._receive()
        entries = [] if self._stuck else self.plan.next_batch(len(self.in_flight))
        if entries:
            self.in_flight.append(self.executor.run(entries))
        results = 0
        while len(self.in_flight) > (1 if entries and self.overlap else 0):
            self._resolve(self.in_flight.popleft())
            results += 1
        worked = bool(entries or results)
        if worked:
            self.check.busy()
        if self.idle and not self._rest:
            self.check.idle()
        self._rest = self.idle
        if worked or self._rest:
            self.progress = self.clock()
        if self.changed:
            self.tell([(request, len(request.output), request.finish) for request in self.changed])
            self.changed.clear()
        return worked

    def _receive(self) -> None:
        """Run the commands that came and reap sessions; after either the account at rest is due again."""
        while True:
            try:
                self.inbox.get_nowait()()
                self._rest = False
            except queue.Empty:
                break
        now = self.clock()
        if now - self._reaped >= 1.0:
            self._reaped = now
            before = len(self.sessions.by_id)
            for holding in self.sessions.reap(now):
                self.cache.release(holding)
            self._rest &= len(self.sessions.by_id) == before

    def _resolve(self, result: Result) -> None:
        """Read a batch's results and act on them."""
        for entry in result.deliver(late=self.faults.on("late-result-after-retract")):
            request = entry.request
            if entry.decode:
                self.decoding.resolve(entry)
            elif request.state != "waiting":
                self.cache.publish(request, entry.end)
            if entry.final and request.state == "running":
                self.changed[request] = None
                reason = request.ended()
                if reason is not None:
                    self._finish(request, reason)

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        self.plan.drop(request)
        request.finish, request.state = reason, "done"
        request.epoch += 1
        self.prompt_total += len(request.prompt)
        self.generated_total += len(request.output)
        self.cached_total += request.cached or 0
        self.cache.finish(request)

    def _abort(self, request: Request, message: str) -> None:
        self.plan.drop(request)
        self._stuck |= self.faults.on("health-lies-when-stuck")
        self.cache.abort(request)
        request.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}
        request.state = "done"
        request.epoch += 1
        self.aborted_total += 1
        self.changed[request] = None
        self._rest = False
