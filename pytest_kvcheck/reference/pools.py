"""Who owns which slot: the table of request rows, the page allocators and the KV tensors.

A *slot* holds the KV of one token in every layer of its pool. Slots come in *pages* of ``page_size``; page 0
is a dummy that nobody owns, so that a padded index never hits live KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .faults import Faults

if TYPE_CHECKING:
    from .radix import Node

Ints = NDArray[np.int64]


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold so many tokens."""
    return -(-tokens // page_size)


class PageAllocator:
    """Free pages as a stack: what was freed last is used first, so that a premature free shows at once.

    ``times_free[page]`` counts how often a page is in the stack, for the check that it is there once at most.
    """

    def __init__(self, tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = tokens // page_size
        # Room for twice as many: a double free must be found by the check, not by an index error.
        self._stack = np.zeros(2 * self.pages + 2, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        self._stack[: self.pages] = np.arange(self.pages, 0, -1)
        self._count = self.pages
        self.times_free = np.ones(self.pages + 1, dtype=np.int8)
        self.times_free[0] = 0

    @property
    def total(self) -> int:
        """Size in tokens."""
        return self.pages * self.page_size

    @property
    def available(self) -> int:
        """Free tokens."""
        return self._count * self.page_size

    def take(self, pages: int) -> Ints | None:
        """So many page numbers, or None (and nothing taken) where there are fewer."""
        if pages > self._count:
            return None
        self._count -= pages
        taken = self._stack[self._count : self._count + pages][::-1].copy()
        self.times_free[taken] -= 1
        return taken

    def give(self, pages: Ints) -> None:
        count = min(len(pages), len(self._stack) - self._count)
        self._stack[self._count : self._count + count] = pages[:count]
        self._count += count
        np.add.at(self.times_free, pages[:count], 1)


@dataclass
class Holding:
    """The KV that one request or one idle session holds: positions of a row of the table.

    ``committed``: tokens whose KV is valid and belongs to the visible history. ``allocated``: positions that
    have a slot, at least as many. ``protected``: the first so many positions belong to the prefix tree (a
    whole number of pages) and are kept there by the lock on ``node``. ``evicted``: how far the sliding window
    has given slots back.
    """

    row: int
    committed: int = 0
    allocated: int = 0
    protected: int = 0
    evicted: int = 0
    node: Node | None = field(default=None, repr=False)


class Rows:
    """The table of slots, [rows, width]: row of a request x position -> slot of the full pool."""

    def __init__(self, rows: int, width: int) -> None:
        self.total = rows
        self.slots: Ints = np.zeros((rows, width), dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        self.free = list(range(self.total - 1, -1, -1))

    def take(self) -> int | None:
        return self.free.pop() if self.free else None

    def give(self, row: int) -> None:
        self.free.append(row)


class Memory:
    """Rows and slots together. Everything that changes ``allocated`` is here.

    With a sliding window there is a second, smaller pool. A page of the full pool has a partner there,
    ``partner[page]``, until the window has left it (then 0); ``holding.evicted`` says up to where that is so.
    """

    def __init__(
        self,
        tokens: int,
        page_size: int,
        rows: int,
        width: int,
        faults: Faults,
        window: int = 0,
        swa_tokens: int = 0,
    ) -> None:
        self.page_size, self.faults, self.window = page_size, faults, window
        self.rows = Rows(rows, width)
        self.full = PageAllocator(tokens, page_size)
        self.swa = PageAllocator(swa_tokens, page_size) if window else None
        self.clear()

    def clear(self) -> None:
        self.rows.clear()
        self.full.clear()
        self.partner: Ints = np.zeros(self.full.pages + 1, dtype=np.int64)
        if self.swa is not None:
            self.swa.clear()

    def swa_slots(self, slots: Ints) -> Ints:
        """The slots of the sliding pool that belong to these of the full pool; the dummy where the window
        left.
        """
        return self.partner[slots // self.page_size] * self.page_size + slots % self.page_size

    def pages_to_grow(self, holding: Holding | None, upto: int) -> int:
        """How many pages it takes to give positions up to ``upto`` a slot."""
        held = holding.allocated if holding else 0
        return max(0, pages_for(upto, self.page_size) - pages_for(held, self.page_size))

    def grow(self, holding: Holding, upto: int) -> bool:
        """Give positions up to ``upto`` a slot; False (and nothing changed) where a pool is short."""
        if upto <= holding.allocated:
            return True
        size = self.page_size
        have = pages_for(holding.allocated, size)
        count = pages_for(upto, size) - have
        if self.swa is not None and count * size > self.swa.available:
            return False
        pages = self.full.take(count)
        if pages is None:
            return False
        if self.swa is not None:
            partners = self.swa.take(count)
            assert partners is not None
            self.partner[pages] = partners
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        self.rows.slots[holding.row, have * size : have * size + len(slots)] = slots
        holding.allocated = upto
        return True

    def free_range(self, holding: Holding, start: int, end: int) -> int:
        """Free the pages of positions ``[start, end)``; a page that begins before ``start`` stays.

        Returns the number of tokens freed. The caller sets ``allocated``.
        """
        size = self.page_size
        first, last = pages_for(start, size), pages_for(end, size)
        if self.faults.on("partial-page-freed") and start > holding.protected:
            first = start // size
        if first >= last:
            return 0
        self.free_window(holding, first * size, last * size)
        self.full.give(self._pages(holding, first, last))
        return (last - first) * size

    def free_window(self, holding: Holding, start: int, end: int) -> None:
        """Free the sliding pool's part of the whole pages in ``[start, end)`` that the window has not left
        yet.
        """
        if self.swa is not None:
            size = self.page_size
            pages = self._pages(holding, pages_for(max(start, holding.evicted), size), end // size)
            self.give_partners(pages)

    def give_partners(self, pages: Ints) -> None:
        """Free the sliding pool's pages that belong to these of the full pool."""
        if self.swa is not None:
            partners = self.partner[pages]
            self.swa.give(partners[partners > 0])
            self.partner[pages] = 0

    def cut(self, holding: Holding, length: int) -> None:
        """Free what lies past ``length`` and cap the counts to it; a partial page stays."""
        self.free_range(holding, length, holding.allocated)
        holding.allocated = min(holding.allocated, length)
        holding.committed = min(holding.committed, length)
        if not self.faults.on("swa-cursor-uncapped"):
            holding.evicted = min(holding.evicted, length)

    def slide(self, holding: Holding, length: int) -> None:
        """Give back the sliding pool's pages that no query at ``length`` or later can see."""
        size = self.page_size
        cursor = max(0, length + 1 - self.window) // size * size
        if self.swa is None or cursor <= holding.evicted:
            return
        if size < self.window or not self.faults.on("swa-page-ge-window"):
            self.free_window(holding, holding.protected, cursor)
        holding.evicted = cursor

    def window_lost(self, holding: Holding, length: int) -> bool:
        """Whether a query at ``length`` would miss keys that the window has left already."""
        return self.swa is not None and holding.evicted > max(0, length + 1 - self.window)

    def private_tokens(self, holding: Holding) -> int:
        """Tokens of the full pool that this holding owns itself, in whole pages."""
        size = self.page_size
        return (pages_for(holding.allocated, size) - pages_for(holding.protected, size)) * size

    def private_window_tokens(self, holding: Holding) -> int:
        """The same of the sliding pool."""
        size = self.page_size
        first = pages_for(max(holding.protected, holding.evicted), size)
        return max(0, pages_for(holding.allocated, size) - first) * size

    def private_pages(self, holding: Holding) -> Ints:
        size = self.page_size
        return self._pages(holding, pages_for(holding.protected, size), pages_for(holding.allocated, size))

    def _pages(self, holding: Holding, first: int, last: int) -> Ints:
        """The ``first``-th to the ``last``-th page of a row."""
        size = self.page_size
        return self.rows.slots[holding.row, first * size : last * size : size] // size


def kv_tensors(
    layers: tuple[int, int],
    slots: tuple[int, int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pools of full and of sliding layers, [layers, 2, slots, kv_heads, head_dim]."""
    full, sliding = (
        torch.zeros(count, 2, size, heads, dim, dtype=dtype, device=device)
        for count, size in zip(layers, slots, strict=True)
    )
    return full, sliding
