"""The strict memory check: every slot and every row has exactly one owner, at every iteration.

Speaks as SGLang does from 0.5.11 on, so that one set of log rules reads both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from .batch import Request
from .cache import KVCache
from .pools import Holding

log = logging.getLogger("kvcheck.reference")


class MemoryFault(Exception):
    """The account does not add up; the engine must not go on."""


@dataclass(frozen=True)
class Account:
    """One pool's tokens by owner."""

    total: int
    available: int
    evictable: int
    protected: int
    session_held: int
    uncached: int

    @property
    def owned(self) -> int:
        return self.available + self.evictable + self.protected + self.session_held + self.uncached

    def __str__(self) -> str:
        return (
            f"total={self.total}, available={self.available}, evictable={self.evictable}, "
            f"protected={self.protected}, session_held={self.session_held}, uncached={self.uncached}"
        )


def environment_level(name: str, default: int) -> int:
    """An environment variable that holds a level or a truth value."""
    text = os.environ.get(name, "").strip().lower()
    if text in ("true", "yes", "on"):
        return 1
    return int(text) if text.isdigit() else 0 if text in ("false", "no", "off") else default


class MemoryCheck:
    """``active`` names the requests that hold a row or slots. ``silent``: never look."""

    def __init__(self, cache: KVCache, active: Callable[[], Iterable[Request]], silent: bool) -> None:
        self.cache, self.active = cache, active
        self.busy_level = 0 if silent else environment_level("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", 0)
        self.idle_level = 0 if silent else environment_level("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", 1)
        self.pages = environment_level("SGLANG_CHECK_KV_PAGE_INVARIANTS", int(self.busy_level > 0))

    def account(self) -> Account:
        """The full pool's account now."""
        memory, tree = self.cache.memory, self.cache.tree
        return Account(
            total=memory.full.total,
            available=memory.full.available,
            evictable=tree.full.evictable,
            protected=tree.full.protected,
            session_held=sum(map(memory.private_tokens, self.cache.sessions.held())),
            uncached=sum(map(memory.private_tokens, self._lent())),
        )

    def swa_account(self) -> Account | None:
        """The sliding pool's account now, if there is one."""
        memory, tree = self.cache.memory, self.cache.tree
        if memory.swa is None:
            return None
        return Account(
            total=memory.swa.total,
            available=memory.swa.available,
            evictable=tree.swa.evictable,
            protected=tree.swa.protected,
            session_held=sum(map(memory.private_window_tokens, self.cache.sessions.held())),
            uncached=sum(map(memory.private_window_tokens, self._lent())),
        )

    def accounts(self) -> dict[str, Account]:
        """The accounts by SGLang's names of the pools."""
        swa = self.swa_account()
        return {"full": self.account()} | ({"swa": swa} if swa is not None else {})

    def _lent(self) -> list[Holding]:
        return [request.holding for request in self.active() if request.holding is not None]

    def busy(self) -> None:
        """After an iteration. Raises :class:`MemoryFault`."""
        if not self.busy_level:
            return
        accounts = self.accounts()
        if self.busy_level > 1:
            for name, account in accounts.items():
                log.info("[Mem Check (BUSY)] [%s] %s", name, account)
        for name, account in accounts.items():
            if account.owned != account.total:
                title = {"full": "Full", "swa": "SWA"}[name]
                raise MemoryFault(f"{title} Pool Mem Leak Detected! [{name}] {account}")
        self._check_pages()

    def idle(self) -> None:
        """When nothing runs or waits. Raises :class:`MemoryFault`."""
        if not self.idle_level:
            return
        lost = [
            f"[{name}] {account}" for name, account in self.accounts().items() if account.owned != account.total
        ]
        if lost:
            raise MemoryFault("pool memory leak detected! " + "\n".join(lost))
        rows = self.cache.memory.rows
        held = sum(1 for _ in self.cache.sessions.held())
        if len(rows.free) + held != rows.total:
            raise MemoryFault(
                f"req_to_token_pool memory leak detected!available_size={len(rows.free)}, session_held={held}, "
                f"total_size={rows.total}"
            )
        self._check_pages()

    def _check_pages(self) -> None:
        """No page is free twice, and no free page has an owner."""
        if not self.pages:
            return
        memory, tree = self.cache.memory, self.cache.tree
        for index, pool in enumerate([memory.full] if memory.swa is None else [memory.full, memory.swa]):
            if pool.times_free.max() > 1:
                twice = int((pool.times_free > 1).sum())
                raise MemoryFault(f"KV double free: sub-pool {index} has {twice} duplicate pages.")
        owned = tree.owns.copy()
        for holding in [*self._lent(), *self.cache.sessions.held()]:
            owned[memory.private_pages(holding)] = 1
            if holding.committed > holding.allocated:
                raise MemoryFault(f"KV length error: committed beyond allocated in {holding}")
        lost = np.flatnonzero(owned & memory.full.times_free)
        if len(lost):
            raise MemoryFault(
                f"KV page use-after-free: {len(lost)} owner page refs are in the free pool, "
                f"sample pages={lost[:8].tolist()}"
            )
