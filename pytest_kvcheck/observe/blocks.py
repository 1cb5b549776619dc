"""The blocks of a prefix cache, as an engine's own events tell of them: which are stored, and for whom.

Such events tell of full blocks only. They name what is cached, not what is referenced: a block that was never
removed is proof of a reference only once everything that may be overwritten was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class StoredBlock:
    """One block. ``tokens`` are its own ids, () where an event does not tell which; ``users`` are the names of
    the requests that stored or hit it, in their order, "" where the engine did not say whose it was.
    """

    tokens: tuple[int, ...] = ()
    parent: StoredBlock | None = None
    users: list[str] = field(default_factory=list)

    def prefix(self) -> tuple[int, ...]:
        """All ids from the first token to this block's end; () where one block does not tell its own."""
        parts: list[tuple[int, ...]] = []
        block: StoredBlock | None = self
        while block is not None:
            if not block.tokens:
                return ()
            parts.append(block.tokens)
            block = block.parent
        return tuple(token for part in reversed(parts) for token in part)


class BlockBook:
    """Which blocks are stored now. One thread writes, others may read.

    Two blocks of equal content count as one, gone when one of them is: rather one unseen than one made up.
    """

    def __init__(self) -> None:
        self._blocks: dict[Hashable, StoredBlock] = {}

    def store(
        self,
        keys: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        size: int,
        user: str = "",
    ) -> None:
        """A run of blocks of ``size`` tokens behind ``parent`` was stored for, or hit by, ``user``."""
        whole = len(tokens) == size * len(keys)  # else blocks of the run were left out, and nobody says which
        before = self._blocks.get(parent) if parent is not None else None
        known = whole and (parent is None or before is not None)
        for at, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                own = tuple(tokens[at * size : (at + 1) * size]) if known else ()
                block = self._blocks[key] = StoredBlock(own, before)
            block.users.append(user)
            before = block if whole else None

    def remove(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def clear(self) -> None:
        self._blocks.clear()

    def snapshot(self) -> dict[Hashable, StoredBlock]:
        """The blocks by their keys. A block that was stored anew in between is another object."""
        return dict(self._blocks)
