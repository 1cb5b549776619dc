"""The prefix cache: a radix tree of token pages with locks and least-recently-used eviction.

A locked node, and every node above it, is *protected*; the rest is *evictable*. Both are counted as they
change, once for each pool: with a sliding window a node may have given its window KV back and live on in the
full pool.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np

from .pools import Ints, Memory

NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Node:
    """A run of whole pages: ``key`` holds the tokens and ``slots`` where their KV lies.

    ``windowed``: its pages have partners in the sliding pool.
    """

    __slots__ = ("children", "key", "locks", "parent", "slots", "used", "windowed")

    def __init__(self, key: Ints, slots: Ints, parent: Node | None, windowed: bool) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.windowed = windowed
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0


@dataclass
class Tally:
    """Tokens of one pool that the tree owns."""

    evictable: int = 0
    protected: int = 0


class RadixCache:
    """A tree over the pools. ``enabled`` False: nothing matches and nothing is kept.

    ``owns[page]`` is 1 for the pages of the full pool that the tree owns.
    """

    def __init__(self, memory: Memory, enabled: bool = True) -> None:
        self.memory = memory
        self.page_size = memory.page_size
        self.enabled = enabled
        self.clear()

    def clear(self) -> None:
        self.root = Node(NOTHING, NOTHING, None, True)
        self.full, self.swa = Tally(), Tally()
        self.owns = np.zeros(self.memory.full.pages + 1, dtype=np.int8)
        self._clock = count(1)

    def whole_pages(self, length: int) -> int:
        """The length of the whole pages in so many tokens; 0 where the cache is off."""
        return length // self.page_size * self.page_size if self.enabled else 0

    def path(self, tokens: Ints) -> list[Node]:
        """The nodes of the longest cached prefix in whole pages; the last is split to end with it."""
        node, found, at = self.root, [], 0
        end = self.whole_pages(len(tokens))
        now = next(self._clock)
        while at < end:
            child = node.children.get(self._page(tokens, at))
            if child is None:
                break
            same = self._common(child.key, tokens[at:end])
            if same < len(child.key):
                child = self._split(child, same)
            child.used = now
            found.append(child)
            node, at = child, at + same
        return found

    def match(self, tokens: Ints) -> list[Node]:
        """The part of :meth:`path` that a request can start from: its last window has its window KV."""
        found = self.path(tokens)
        best, live, gap = 0, 0, False
        for index, node in enumerate(found):
            live, gap = (live + len(node.key), gap) if node.windowed else (0, True)
            if not gap or live >= self.memory.window:
                best = index + 1
        return found[:best]

    def insert(self, tokens: Ints, slots: Ints, evicted: int) -> int:
        """Give whole pages to the tree; returns how many tokens it had already (their slots stay the caller's).

        Positions before ``evicted`` have no window KV any more.
        """
        found = self.path(tokens)
        had = at = sum(len(node.key) for node in found)
        node = found[-1] if found else self.root
        for end in sorted({min(max(evicted, had), len(tokens)), len(tokens)}):
            if end > at:
                child = Node(tokens[at:end].copy(), slots[at:end].copy(), node, at >= evicted)
                child.used = next(self._clock)
                node.children[self._page(child.key, 0)] = child
                self._count(child, "evictable", 1)
                self.owns[self._pages(child)] = 1
                node, at = child, end
        return had

    def lock(self, node: Node | None) -> None:
        """Keep the prefix that ends with the node from eviction until :meth:`unlock`; None: the empty
        prefix.
        """
        while node is not None and node is not self.root:
            if node.locks == 0:
                self._count(node, "evictable", -1)
                self._count(node, "protected", 1)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        while node is not None and node is not self.root:
            node.locks -= 1
            if node.locks == 0:
                self._count(node, "protected", -1)
                self._count(node, "evictable", 1)
            node = node.parent

    def evict(self, tokens: int) -> None:
        """Free at least so many tokens of unlocked leaves, the longest unused first, if there are as many."""
        leaves = [(node.used, id(node), node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        while tokens > 0 and leaves:
            node = heapq.heappop(leaves)[2]
            tokens -= len(node.key)
            self._count(node, "evictable", -1)
            self.memory.give_partners(self._pages(node))
            self.memory.full.give(self._pages(node))
            self.owns[self._pages(node)] = 0
            parent = node.parent
            assert parent is not None
            del parent.children[self._page(node.key, 0)]
            if parent is not self.root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, id(parent), parent))

    def evict_window(self, tokens: int) -> None:
        """Free at least so many tokens of the sliding pool, the longest unused unlocked nodes first."""
        for node in sorted(self.nodes(), key=lambda node: node.used):
            if tokens > 0 and node.windowed and not node.locks:
                tokens -= len(node.key)
                self.swa.evictable -= len(node.key)
                self.memory.give_partners(self._pages(node))
                node.windowed = False

    def nodes(self) -> list[Node]:
        """Every node but the root."""
        found, todo = [], list(self.root.children.values())
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found

    def _count(self, node: Node, what: str, sign: int) -> None:
        for tally in (self.full, self.swa) if node.windowed and self.memory.window else (self.full,):
            setattr(tally, what, getattr(tally, what) + sign * len(node.key))

    def _pages(self, node: Node) -> Ints:
        return node.slots[:: self.page_size] // self.page_size

    def _page(self, tokens: Ints, at: int) -> bytes:
        return tokens[at : at + self.page_size].tobytes()

    def _common(self, key: Ints, tokens: Ints) -> int:
        length = min(len(key), len(tokens))
        differ = np.nonzero(key[:length] != tokens[:length])[0]
        return self.whole_pages(int(differ[0]) if len(differ) else length)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper half, which has the lower as its only child."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.key[:at], node.slots[:at], parent, node.windowed)
        upper.locks, upper.used = node.locks, node.used
        parent.children[self._page(node.key, 0)] = upper
        node.key, node.slots, node.parent = node.key[at:], node.slots[at:], upper
        upper.children[self._page(node.key, 0)] = node
        return upper


def slots_of(path: list[Node]) -> Ints:
    """The slots of a path's tokens."""
    return np.concatenate([NOTHING, *(node.slots for node in path)])
