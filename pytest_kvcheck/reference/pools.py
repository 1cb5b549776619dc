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
    """Rows and slots together. Everything that changes ``allocated`` is here."""

    def __init__(self, tokens: int, page_size: int, rows: int, width: int, faults: Faults) -> None:
        self.page_size = page_size
        self.faults = faults
        self.rows = Rows(rows, width)
        self.full = PageAllocator(tokens, page_size)

    def clear(self) -> None:
        self.rows.clear()
        self.full.clear()

    def pages_to_grow(self, holding: Holding | None, upto: int) -> int:
        """How many pages it takes to give positions up to ``upto`` a slot."""
        held = holding.allocated if holding else 0
        return max(0, pages_for(upto, self.page_size) - pages_for(held, self.page_size))

    def grow(self, holding: Holding, upto: int) -> bool:
        """Give positions up to ``upto`` a slot; False (and nothing changed) where the pool is short."""
        if upto <= holding.allocated:
            return True
        size = self.page_size
        have = pages_for(holding.allocated, size)
        pages = self.full.take(pages_for(upto, size) - have)
        if pages is None:
            return False
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
        if first >= last:
            return 0
        self.full.give(self.rows.slots[holding.row, first * size : last * size : size] // size)
        return (last - first) * size

    def cut(self, holding: Holding, length: int) -> None:
        """Free what lies past ``length`` and cap the counts to it; a partial page stays."""
        self.free_range(holding, length, holding.allocated)
        holding.allocated = min(holding.allocated, length)
        holding.committed = min(holding.committed, length)

    def private_tokens(self, holding: Holding) -> int:
        """Tokens of the pool that this holding owns itself, in whole pages."""
        size = self.page_size
        return (pages_for(holding.allocated, size) - pages_for(holding.protected, size)) * size

    def private_pages(self, holding: Holding) -> Ints:
        size = self.page_size
        first, last = pages_for(holding.protected, size), pages_for(holding.allocated, size)
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
