"""The accounting of a decode step: which slots it needs, what is claimed before it and what after."""

from __future__ import annotations

from .batch import Entry, Request
from .cache import KVCache


class Decoding:
    """Plain decoding: one slot and one committed token, claimed before the forward pass that fills it.

    ``in_flight`` is the number of launched batches whose results have not been read.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def upto(self, request: Request, in_flight: int) -> int:
        """Up to which position the next step needs slots."""
        assert request.holding is not None
        return request.holding.committed + 1

    def prepare(self, request: Request, in_flight: int) -> Entry:
        """Allocate and claim for the next step."""
        assert request.holding is not None
        entry = self._entry(request, in_flight, request.holding.committed, 1)
        request.holding.committed += 1
        return entry

    def resolve(self, entry: Entry) -> None:
        """The step's result was read."""

    def _entry(self, request: Request, in_flight: int, start: int, width: int) -> Entry:
        holding = request.holding
        assert holding is not None
        grown = self.cache.grow(holding, self.upto(request, in_flight))
        assert grown, "decode without slots"
        self.cache.memory.slide(holding, request.known)
        return Entry(request, holding, request.epoch, start, start + width, final=True, decode=True)
