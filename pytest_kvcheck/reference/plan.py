"""Planning: which requests the next batch holds, who is admitted, who is sent back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .batch import Entry, Request
from .cache import KVCache
from .decoding import Decoding

log = logging.getLogger("kvcheck.reference")

# A request keeps this many tokens of its answer in reserve when it is admitted beside others.
RESERVE = 16


@dataclass(frozen=True)
class Limits:
    """``chunk`` None: a prompt is prefilled in one piece. ``retract_interval`` 0: no forced retraction."""

    context: int
    max_running: int
    chunk: int | None
    mixed: bool
    overlap: bool
    retract_interval: int


class Planner:
    """Holds every live request: waiting, between two prefill chunks (``chunked``), or running.

    ``give_up`` is called for a request that cannot go on although it is alone.
    """

    def __init__(
        self, cache: KVCache, decoding: Decoding, limits: Limits, give_up: Callable[[Request, str], None]
    ) -> None:
        self.cache, self.decoding, self.limits, self.give_up = cache, decoding, limits, give_up
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.batches = 0
        self.retracted_total = 0

    def live(self) -> Iterator[Request]:
        """Every request that may hold a row or slots."""
        yield from self.waiting
        if self.chunked is not None:
            yield self.chunked
        yield from self.running

    def drop(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        if request is self.chunked:
            self.chunked = None
        elif request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def next_batch(self, in_flight: int) -> list[Entry]:
        """The next batch, prefill before decode; empty where nothing can run.

        ``in_flight`` is the number of launched batches whose results have not been read.
        """
        entries = self._prefill(in_flight) or self._decode(in_flight)
        self.batches += bool(entries)
        return entries

    # --- prefill ---------------------------------------------------------------------------------
    def _prefill(self, in_flight: int) -> list[Entry]:
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
            if not self._start(request, in_flight):
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
        if self.limits.mixed and decoding and self._decodable(decoding, in_flight):
            entries += [self.decoding.prepare(request, in_flight) for request in decoding]
        return entries

    def _start(self, request: Request, in_flight: int) -> bool:
        """Admit a request. Where nothing is under way that could make room for it, idle sessions do."""
        while not self.cache.start(request, self._spare()):
            busy = self.running or self.chunked or in_flight
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
        self.cache.memory.slide(holding, request.filled)
        if end <= request.filled or not self.cache.grow(holding, end):
            return 0
        final = end == len(request.ids)
        entries.append(Entry(request, holding, request.epoch, request.filled, end, final, decode=False))
        taken = end - request.filled
        request.filled = holding.committed = end
        request.state = "running" if final else "prefill"
        self.chunked = None if final else request
        if final:
            self.running.append(request)
        return taken

    def _log_prefill(self, entries: list[Entry]) -> None:
        new = sum(entry.end - entry.start for entry in entries)
        cached = sum(entry.start for entry in entries if entry.start == entry.request.inherited)
        log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, #running-req: %d, #queue-req: %d",
            len(entries), new, cached, len(self.running), len(self.waiting),
        )  # fmt: skip

    # --- decode ----------------------------------------------------------------------------------
    def _decode(self, in_flight: int) -> list[Entry]:
        """Entries of the next decode batch, after retracting where that is due."""
        interval = self.limits.retract_interval
        forced = interval > 0 and self.batches % interval == 0
        if self.running and (forced or not self._decodable(self.running, in_flight)):
            self._retract(forced, in_flight)
        return [self.decoding.prepare(request, in_flight) for request in self.running]

    def _decodable(self, requests: list[Request], in_flight: int) -> bool:
        memory = self.cache.memory
        pages = sum(memory.pages_to_grow(r.holding, self.decoding.upto(r, in_flight)) for r in requests)
        return pages * memory.page_size <= self.cache.obtainable

    def _retract(self, forced: bool, in_flight: int) -> None:
        """Send requests back to the queue, those with the fewest output tokens first, until the rest fits."""
        before = self.cache.obtainable
        order = sorted(self.running, key=lambda r: (-len(r.output), len(r.prompt)))
        retracted = 0
        while len(order) > 1 and ((forced and not retracted) or not self._decodable(order, in_flight)):
            self._send_back(order.pop())
            retracted += 1
        if self.chunked is not None and not self._decodable(order, in_flight):
            self._send_back(self.chunked)
            retracted += 1
        while not self._decodable(order, in_flight) and self.cache.reclaim_session(order[0].session):
            pass
        if not self._decodable(order, in_flight):
            self.give_up(
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
        if request.state == "prefill":
            request.input_logprobs, request.input_tops = [], []
        self.drop(request)
        request.state = "waiting"
        request.epoch += 1
        request.retractions += 1
        self.retracted_total += 1
        self.waiting.appendleft(request)
