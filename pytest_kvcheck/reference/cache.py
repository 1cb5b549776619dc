"""What a request does with KV in its life: find a prefix, grow, publish, finish, be retracted, be aborted.

Each accounting line that a planted fault breaks is here, beside the question whether it is planted.
"""

from __future__ import annotations

from .batch import Request
from .faults import Faults
from .pools import Holding, Memory
from .radix import RadixCache, slots_of
from .sessions import Session, Sessions


class KVCache:
    """Pools, prefix tree and sessions, and the moves between them."""

    def __init__(self, memory: Memory, tree: RadixCache, sessions: Sessions, faults: Faults) -> None:
        self.memory, self.tree, self.sessions, self.faults = memory, tree, sessions, faults

    @property
    def obtainable(self) -> int:
        """Tokens that are free or can be evicted, in the pool that has fewer of them."""
        full = self.memory.full.available + self.tree.full.evictable
        swa = self.memory.swa
        return full if swa is None else min(full, swa.available + self.tree.swa.evictable)

    def start(self, request: Request, spare: int) -> bool:
        """Admit a waiting request: find its prefix, give it a row; False where rows or slots are short.

        ``spare`` tokens must stay obtainable for the requests that run. A request for which only slots are
        short keeps the row that it was given: it is the next in line.
        """
        request.refill()
        limit = len(request.ids) - 1
        session = request.session
        if session is not None and session.holding is not None:
            holding = session.holding
            prefix = min(holding.committed, limit)
            if self.faults.on("stale-tail-on-next-turn"):
                holding.allocated = holding.committed = prefix
            else:
                self.memory.cut(holding, prefix)
            if not self._fits(holding, len(request.ids), spare):
                return False
            request.holding, request.inherited = holding, prefix
        elif not self._start_from_tree(request, limit, spare):
            return False
        request.filled = request.inherited
        if request.cached is None:
            request.cached = request.inherited
            if session is not None and session.tokens and self.faults.on("cached-tokens-off-by-one"):
                request.cached += 1
        return True

    def reserve_row(self, request: Request) -> None:
        """Give the next in line a row, if it has none and one is free."""
        has_one = request.holding or (request.session is not None and request.session.holding)
        row = None if has_one else self.memory.rows.take()
        if row is not None:
            request.holding = Holding(row)

    def _start_from_tree(self, request: Request, limit: int, spare: int) -> bool:
        self.reserve_row(request)
        holding = request.holding
        if holding is None:
            return False
        if request.input_start >= 0 and not request.input_logprobs:
            limit = min(limit, request.input_start)
        path = self.tree.match(request.ids[:limit])
        node, slots = path[-1] if path else None, slots_of(path)
        self.tree.lock(node)
        holding.allocated = len(slots)
        if not self._fits(holding, len(request.ids), spare):
            holding.allocated = 0
            self.tree.unlock(node)
            return False
        self.memory.rows.slots[holding.row, : len(slots)] = slots
        holding.node = node
        holding.committed = holding.protected = request.inherited = len(slots)
        return True

    def _fits(self, holding: Holding, upto: int, spare: int) -> bool:
        pages = self.memory.pages_to_grow(holding, upto)
        return pages * self.memory.page_size + spare <= self.obtainable

    def grow(self, holding: Holding, upto: int) -> bool:
        """Give positions up to ``upto`` a slot, evicting from the tree as needed; False where that is not
        enough.
        """
        need = self.memory.pages_to_grow(holding, upto) * self.memory.page_size
        if need > self.memory.full.available:
            self.tree.evict(need - self.memory.full.available)
        if self.memory.swa is not None and need > self.memory.swa.available:
            self.tree.evict_window(need - self.memory.swa.available)
        return self.memory.grow(holding, upto)

    def publish(self, request: Request, upto: int) -> None:
        """Give the first ``upto`` tokens of a prompt to the tree for others to share, and lock them.

        A session publishes its first prompt only; what comes later is its own.
        """
        holding = request.holding
        assert holding is not None
        whole = self.tree.whole_pages(upto)
        if whole <= holding.protected or (request.session is not None and request.session.holding is not None):
            return
        at = 0
        for node in self.tree.path(request.ids[:whole]):
            at += len(node.key)
            if at > holding.protected and not node.windowed:
                return  # the tree's copy lacks the window KV that this request still needs
        row = self.memory.rows.slots[holding.row]
        had = self.tree.insert(request.ids[:whole], row[:whole], holding.evicted)
        self.memory.free_range(holding, holding.protected, had)
        path = self.tree.path(request.ids[:whole])
        row[:whole] = slots_of(path)
        self.tree.lock(path[-1])
        self.tree.unlock(holding.node)
        holding.node, holding.protected = path[-1], whole

    def finish(self, request: Request) -> None:
        """The request ended well: a session keeps its KV, a plain request leaves its KV to the tree."""
        holding = request.holding
        assert holding is not None
        history = request.prompt + request.output
        if request.session is not None:
            kept = len(history)
            if self.faults.on("stop-overshoot-kept") and request.finish and request.finish["type"] == "stop":
                kept = max(kept, holding.committed)
            if not self.faults.on("overshoot-untrimmed"):
                self.memory.cut(holding, kept)
            request.session.tokens = history
            request.session.holding = holding
        else:
            request.refill()
            whole = self.tree.whole_pages(min(holding.committed, len(history)))
            had = self.tree.insert(
                request.ids[:whole], self.memory.rows.slots[holding.row, :whole], holding.evicted
            )
            self.memory.free_range(holding, holding.protected, had)
            self.memory.free_range(holding, whole, holding.allocated)
            self._let_go(holding)
        self._end(request)

    def retract(self, request: Request) -> None:
        """Take a running request's KV away; it waits again with its output so far."""
        holding = request.holding
        assert holding is not None
        session = request.session
        if session is not None and session.holding is holding:
            length = self._roll_back(holding, request.inherited)
            if self.faults.on("retract-tail"):
                holding.allocated = holding.committed = length
            else:
                self.memory.cut(holding, length)
        else:
            if not self.faults.on("retract-tail"):
                self.memory.free_range(holding, holding.protected, holding.allocated)
            self._let_go(holding)
        request.holding = None

    def abort(self, request: Request) -> None:
        """Roll back: a session returns to its last finished turn, all else that the request held is freed."""
        holding, session = request.holding, request.session
        if session is not None and self.faults.on("aborted-turn-kept-as-history"):
            session.tokens = request.prompt + request.output
            session.holding = holding or session.holding
        elif holding is not None and session is not None and session.holding is holding:
            # What the aborted turn wrote stays behind as a stale tail, which the next turn frees.
            holding.committed = self._roll_back(holding, request.inherited)
            if request.state == "prefill" and self.faults.on("abort-prefill-chunk"):
                holding.allocated = holding.committed
        elif holding is not None and request.state == "waiting":
            if not self.faults.on("abort-queued-row"):
                self.memory.rows.give(holding.row)
        elif holding is not None:
            if request.state != "prefill" or not self.faults.on("abort-prefill-chunk"):
                self.memory.free_range(holding, holding.protected, holding.allocated)
            self._let_go(holding)
        self._end(request)

    def _roll_back(self, holding: Holding, length: int) -> int:
        """How much of a session's KV a turn that comes to nothing leaves: ``length``, unless the sliding window
        has moved past it; then nothing, and the history is computed again."""
        if not self.memory.window_lost(holding, length):
            return length
        self.memory.free_range(holding, holding.protected, holding.allocated)
        self.tree.unlock(holding.node)
        holding.node, holding.protected, holding.allocated = None, 0, 0
        self.memory.cut(holding, 0)
        return 0

    def release(self, holding: Holding) -> None:
        """Free all that a closed session held."""
        freed = self.memory.free_range(holding, holding.protected, holding.allocated)
        if freed and self.faults.on("double-free"):
            self.memory.full.give(self.memory.private_pages(holding)[-1:])
        self._let_go(holding)

    def reclaim_session(self, asking: Session | None) -> bool:
        """Free what the longest inactive session holds; its next turn computes its history again. False:
        none.
        """
        idle = [s for s in self.sessions.by_id.values() if s.held is not None and s is not asking]
        if not idle:
            return False
        session = min(idle, key=lambda s: s.last_active)
        assert session.holding is not None
        self.release(session.holding)
        session.holding = None
        return True

    def _let_go(self, holding: Holding) -> None:
        """Unlock the shared prefix and return the row."""
        if not self.faults.on("lock-never-released"):
            self.tree.unlock(holding.node)
        self.memory.rows.give(holding.row)

    def _end(self, request: Request) -> None:
        request.holding = None
        if request.session is not None:
            for holding in self.sessions.end_turn(request.session):
                self.release(holding)

    def clear(self) -> None:
        """Forget everything: prefixes, rows, slots and what sessions hold (their history stays)."""
        self.memory.clear()
        self.tree.clear()
        for session in self.sessions.by_id.values():
            session.holding = None
