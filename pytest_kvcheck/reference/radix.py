"""The prefix cache: a radix tree of token pages with locks and least-recently-used eviction.

A locked node, and every node above it, is *protected*; the rest is *evictable*. Both are counted as they
change.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from .pools import Ints, PageAllocator

NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Node:
    """A run of whole pages: ``key`` holds the tokens and ``slots`` where their KV lies."""

    __slots__ = ("children", "key", "locks", "parent", "slots", "used")

    def __init__(self, key: Ints, slots: Ints, parent: Node | None) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0


class RadixCache:
    """A tree over one allocator. ``enabled`` False: nothing matches and nothing is kept.

    ``owns[page]`` is 1 for the pages that the tree owns.
    """

    def __init__(self, allocator: PageAllocator, enabled: bool = True) -> None:
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.enabled = enabled
        self.clear()

    def clear(self) -> None:
        self.root = Node(NOTHING, NOTHING, None)
        self.evictable = 0
        self.protected = 0
        self.owns = np.zeros(self.allocator.pages + 1, dtype=np.int8)
        self._clock = count(1)

    def whole_pages(self, length: int) -> int:
        """The length of the whole pages in so many tokens; 0 where the cache is off."""
        return length // self.page_size * self.page_size if self.enabled else 0

    def match(self, tokens: Ints) -> tuple[Ints, Node]:
        """The slots of the longest cached prefix in whole pages, and the node where it ends."""
        node, found, at = self.root, [NOTHING], 0
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
            found.append(child.slots)
            node, at = child, at + same
        return np.concatenate(found), node

    def insert(self, tokens: Ints, slots: Ints) -> int:
        """Give whole pages to the tree; returns how many tokens it had already (their slots stay the
        caller's).
        """
        had, node = self.match(tokens)
        if len(had) < len(tokens):
            child = Node(tokens[len(had) :].copy(), slots[len(had) :].copy(), node)
            child.used = next(self._clock)
            node.children[self._page(child.key, 0)] = child
            self.evictable += len(child.key)
            self.owns[self._pages(child)] = 1
        return len(had)

    def lock(self, node: Node) -> None:
        """Keep the node's prefix from eviction until :meth:`unlock`."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.locks == 0:
                self.evictable -= len(at.key)
                self.protected += len(at.key)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None and at is not self.root:
            at.locks -= 1
            if at.locks == 0:
                self.protected -= len(at.key)
                self.evictable += len(at.key)
            at = at.parent

    def evict(self, tokens: int) -> int:
        """Free at least so many tokens of unlocked leaves, the longest unused first; returns how many were
        freed.
        """
        leaves = [(node.used, id(node), node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        freed = 0
        while freed < tokens and leaves:
            node = heapq.heappop(leaves)[2]
            self.allocator.give(self._pages(node))
            self.owns[self._pages(node)] = 0
            freed += len(node.key)
            self.evictable -= len(node.key)
            parent = node.parent
            assert parent is not None
            del parent.children[self._page(node.key, 0)]
            if parent is not self.root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        return freed

    def nodes(self) -> list[Node]:
        """Every node but the root."""
        found, todo = [], list(self.root.children.values())
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found

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
        upper = Node(node.key[:at], node.slots[:at], parent)
        upper.locks, upper.used = node.locks, node.used
        parent.children[self._page(node.key, 0)] = upper
        node.key, node.slots, node.parent = node.key[at:], node.slots[at:], upper
        upper.children[self._page(node.key, 0)] = node
        return upper
