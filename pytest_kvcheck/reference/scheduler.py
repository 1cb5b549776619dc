"""The scheduler: continuous batching, chunked and mixed prefill, retraction, abort, overlapped results.

One iteration admits or decodes one batch and launches it; with overlap the *previous* batch's results are
read only then, so each batch is planned without knowing what the one before it gave. :meth:`Scheduler.step`
is one iteration and needs no thread; :meth:`Scheduler.run_forever` is the server's loop.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .batch import Entry, Request, Result
from .cache import KVCache
from .executor import Executor
from .faults import Faults
from .memcheck import MemoryCheck

log = logging.getLogger("kvcheck.reference")
T = TypeVar("T")

# A request keeps this many tokens of its answer in reserve when it is admitted beside others.
RESERVE = 16
# Positions kept free of prompt at the end of the context, as SGLang does.
INPUT_MARGIN = 5


class Rejected(Exception):
    """A request that the engine refuses; nothing of it was kept."""


@dataclass(frozen=True)
class Limits:
    """``chunk`` None: a prompt is prefilled in one piece. ``retract_interval`` 0: no forced retraction."""

    context: int
    max_running: int
    chunk: int | None
    mixed: bool
    overlap: bool
    retract_interval: int


# A request, how many output tokens are to be told, and how it ended (None: it goes on).
Update = tuple[Request, int, dict[str, Any] | None]


class Scheduler:
    """``tell`` gets the iteration's updates, in this scheduler's thread."""

    def __init__(
        self,
        cache: KVCache,
        executor: Executor,
        limits: Limits,
        faults: Faults,
        tell: Callable[[list[Update]], None],
        silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache, self.executor, self.limits, self.faults, self.tell = cache, executor, limits, faults, tell
        self.sessions, self.clock = cache.sessions, clock
        self.check = MemoryCheck(cache, self._active, silent)
        self.max_length = min(limits.context, cache.memory.full.total) - 1
        self.max_input = self.max_length - INPUT_MARGIN
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.in_flight: deque[Result] = deque()
        self.changed: dict[Request, None] = {}
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.forward_count = 0
        self.retracted_total = self.aborted_total = self.prompt_total = self.generated_total = (
            self.cached_total
        ) = 0
        self.progress = self.clock()
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
        self.waiting.append(request)

    def abort(self, rid: str, everything: bool = False) -> int:
        """Abort the requests whose id begins with ``rid``; returns how many."""
        found = [r for r in [*self.waiting, *self._admitted()] if everything or (rid and r.rid.startswith(rid))]
        for request in found:
            self._abort(request, "Aborted")
        return len(found)

    def abort_one(self, request: Request) -> None:
        """Abort one request if it has not ended: its client went away."""
        if request.finish is None:
            self._abort(request, "Aborted")

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
        return not (self.waiting or self.running or self.chunked or self.in_flight)

    def step(self) -> bool:
        """One iteration; False where there was nothing to do."""
        self._receive()
        entries = [] if self._stuck else self._prefill() or self._decode()
        if entries:
            self.forward_count += 1
            self.in_flight.append(self.executor.run(entries))
        results = 0
        while len(self.in_flight) > (1 if entries and self.limits.overlap else 0):
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
        self._tell()
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

    # --- planning --------------------------------------------------------------------------------
    def _prefill(self) -> list[Entry]:
        """Entries of the next prefill batch, decodes mixed in where that is on; empty: nothing to prefill."""
        entries: list[Entry] = []
        decoding = list(self.running)
        budget = self.limits.chunk or 1 << 30
        if self.limits.mixed:
            budget -= len(self.running)
        if self.chunked is not None:
            budget -= self._extend(self.chunked, budget, entries)
        while (
            self.waiting and self.chunked is None and budget > 0 and len(self.running) < self.limits.max_running
        ):
            request = self.waiting[0]
            if not self._start(request):
                break
            self.waiting.popleft()
            used = self._extend(request, budget, entries)
            budget -= used
            if not used:
                # Not one page fits the budget any more: the next iteration goes on with it.
                request.state, self.chunked = "prefill", request
        if self.waiting:
            self.cache.reserve_row(self.waiting[0])
        if not entries:
            return []
        self._log_prefill(entries)
        if self.limits.mixed and decoding and self._decodable(decoding):
            entries += [self._claim(request) for request in decoding]
        return entries

    def _start(self, request: Request) -> bool:
        """Admit a request. Where nothing is under way that could make room for it, idle sessions do."""
        while not self.cache.start(request, self._spare()):
            busy = self.running or self.chunked or self.in_flight
            if busy or not self.cache.reclaim_session(request.session):
                return False
        return True

    def _spare(self) -> int:
        """Tokens that those who run will need soon."""
        size = self.cache.memory.page_size
        return sum(max(size, min(RESERVE, r.sampling.max_new - len(r.output))) for r in self.running)

    def _extend(self, request: Request, budget: int, entries: list[Entry]) -> int:
        """Add the request's next chunk; returns how many tokens it takes (0: none now)."""
        holding = request.holding
        assert holding is not None
        end = len(request.ids)
        if end - request.filled > budget:
            size = self.cache.memory.page_size
            end = (request.filled + budget) // size * size
        if end <= request.filled or not self.cache.grow(holding, end):
            return 0
        final = end == len(request.ids)
        entries.append(Entry(request, request.epoch, request.filled, end, final, decode=False))
        taken = end - request.filled
        request.filled = holding.committed = end
        request.state = "running" if final else "prefill"
        self.chunked = None if final else request
        if final:
            self.running.append(request)
        return taken

    def _decode(self) -> list[Entry]:
        """Entries of the next decode batch, after retracting where that is due."""
        forced = self.limits.retract_interval > 0 and self.forward_count % self.limits.retract_interval == 0
        if self.running and (forced or not self._decodable(self.running)):
            self._retract(forced)
        return [self._claim(request) for request in self.running]

    def _decodable(self, requests: list[Request]) -> bool:
        memory = self.cache.memory
        pages = sum(memory.pages_to_grow(r.holding, r.holding.committed + 1) for r in requests if r.holding)
        return pages * memory.page_size <= self.cache.obtainable

    def _claim(self, request: Request) -> Entry:
        """One slot and one committed token for the token that this step computes."""
        holding = request.holding
        assert holding is not None
        grown = self.cache.grow(holding, holding.committed + 1)
        assert grown, "decode without a slot"
        holding.committed += 1
        return Entry(request, request.epoch, holding.committed - 1, holding.committed, True, decode=True)

    def _retract(self, forced: bool) -> None:
        """Send requests back to the queue, those with the fewest output tokens first, until the rest fits."""
        before = self.cache.obtainable
        order = sorted(self.running, key=lambda r: (-len(r.output), len(r.prompt)))
        retracted = 0
        while len(order) > 1 and ((forced and not retracted) or not self._decodable(order)):
            self._send_back(order.pop())
            retracted += 1
        if not self._decodable(order):
            if self.chunked is not None:
                self._send_back(self.chunked)
                retracted += 1
            if not self._decodable(order):
                self._abort(
                    order[0], "Out of memory even after retracting all other requests in the decode batch."
                )
        log.info(
            "%s #retracted_reqs: %d, #new_tokens_gained: %d",
            "Testing retraction." if forced else "KV cache pool is full. Retract requests.",
            retracted,
            self.cache.obtainable - before,
        )

    def _send_back(self, request: Request) -> None:
        self.cache.retract(request)
        if request is self.chunked:
            self.chunked = None
            request.input_logprobs, request.input_tops = [], []
        else:
            self.running.remove(request)
        request.state = "waiting"
        request.epoch += 1
        request.retractions += 1
        self.retracted_total += 1
        self.waiting.appendleft(request)

    # --- results ---------------------------------------------------------------------------------
    def _resolve(self, result: Result) -> None:
        """Read a batch's results and act on them."""
        for entry in result.deliver():
            if not entry.decode:
                self.cache.publish(entry.request, entry.end)
            if entry.final:
                self.changed[entry.request] = None
                self._check_finished(entry.request)

    def _check_finished(self, request: Request) -> None:
        output, sampling = request.output, request.sampling
        if output and output[-1] in sampling.stop:
            self._finish(request, {"type": "stop", "matched": output[-1]})
        elif len(output) >= sampling.max_new:
            self._finish(request, {"type": "length", "length": len(output)})

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        self.running.remove(request)
        request.finish, request.state = reason, "done"
        request.epoch += 1
        self.prompt_total += len(request.prompt)
        self.generated_total += len(request.output)
        self.cached_total += request.cached or 0
        self.cache.finish(request)

    def _abort(self, request: Request, message: str) -> None:
        if request is self.chunked:
            self.chunked = None
        elif request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._stuck |= self.faults.on("health-lies-when-stuck")
        self.cache.abort(request)
        request.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}
        request.state = "done"
        request.epoch += 1
        self.aborted_total += 1
        self.changed[request] = None
        self._rest = False

    def _tell(self) -> None:
        if self.changed:
            self.tell([(request, len(request.output), request.finish) for request in self.changed])
            self.changed.clear()

    # --- views -----------------------------------------------------------------------------------
    def _admitted(self) -> Iterator[Request]:
        if self.chunked is not None:
            yield self.chunked
        yield from self.running

    def _active(self) -> Iterator[Request]:
        """Requests that may hold a row or slots."""
        yield from self.waiting
        yield from self._admitted()

    def _log_prefill(self, entries: list[Entry]) -> None:
        new = sum(entry.end - entry.start for entry in entries)
        cached = sum(entry.start for entry in entries if entry.start == entry.request.inherited)
        log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, #running-req: %d, #queue-req: %d",
            len(entries), new, cached, len(self.running), len(self.waiting),
        )  # fmt: skip

    def open_session(self, session_id: str | None, timeout: float | None) -> str:
        """Returns the session's id. Raises ``SessionError`` for an id that is open."""
        return self.sessions.open(session_id, timeout, self.clock())
