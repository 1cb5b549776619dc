"""Whose the blocks are that an engine stored in its prefix cache, and that nothing could overwrite any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from pytest_kvcheck.ledger import SessionLedger
from pytest_kvcheck.observe.blocks import StoredBlock
from pytest_kvcheck.oracles.common import name_of
from pytest_kvcheck.trace import OpRecord

MOST_NAMED = 8


def kept_for(
    kept: Sequence[StoredBlock], records: Sequence[OpRecord], odd: AbstractSet[int], lost: int | None
) -> tuple[list[OpRecord], tuple[str, ...]]:
    """The requests that the blocks were stored for, those with the most first, and the evidence in words.

    Whoever stored the last block of a chain, or began with the same tokens and may have hit it, may hold it.
    Those in ``odd`` (ids of record objects) are meant where there are any: one that went the plain way gave its
    blocks back a thousand times before. ``lost``: how many tokens are missing in all.
    """
    parents = {id(block.parent) for block in kept if block.parent is not None}
    whole = {id(block): block for block in kept}
    named = {record.rid: record for record in records if record.rid is not None and record.op.generates}
    shares: dict[int, tuple[list[OpRecord], list[StoredBlock]]] = {}
    for leaf in (block for block in kept if id(block) not in parents):
        users = [named[user] for user in dict.fromkeys(leaf.users) if user in named]
        prefix = leaf.prefix()
        sharers = [record for record, ids in _computed(records) if prefix and ids[: len(prefix)] == prefix]
        users = next(filter(None, (_of(users, odd), _of(sharers, odd), users, sharers)), [])
        chain: list[StoredBlock] = []
        block: StoredBlock | None = leaf
        while block is not None and id(block) in whole:
            chain.append(whole.pop(id(block)))
            block = block.parent
        for record in users[:1]:
            shares.setdefault(id(record), (users, []))[1].extend(chain)
    largest = sorted(shares.values(), key=lambda share: -len(share[1]))
    owners = [users[0] for users, _ in largest]
    if not owners:
        return [], ()
    lines = [_line(users, blocks) for users, blocks in largest[:MOST_NAMED]]
    if len(largest) > MOST_NAMED:
        lines.append(f"the rest of {len(largest) - MOST_NAMED} more")
    size = max(len(block.tokens) for block in kept)
    rest = (lost or 0) // size - len(kept) if size else 0
    others = f" The other {rest} that are missing were never full, or never cached." if rest > 0 else ""
    text = (
        f"By its block events the engine stored {len(kept)} full blocks in its prefix cache and never "
        f"removed, though fresh tokens overwrote all that may be overwritten: {'; '.join(lines)}.{others}"
    )
    return owners, (text,)


def _of(records: Iterable[OpRecord], odd: AbstractSet[int]) -> list[OpRecord]:
    return [record for record in records if id(record) in odd]


def _line(users: Sequence[OpRecord], blocks: Sequence[StoredBlock]) -> str:
    ends = sorted(len(block.prefix()) for block in blocks)
    where = f", the last one to token {ends[-1]}" if ends[-1] else ""
    others = f" (or of {len(users) - 1} more that used them)" if len(users) > 1 else ""
    return f"{len(blocks)} of {name_of(users[0])}{others}{where}"


def _computed(records: Iterable[OpRecord]) -> Iterable[tuple[OpRecord, tuple[int, ...]]]:
    """Each request with all tokens that it had computed as far as its client knows, its history included."""
    ledgers: dict[str, SessionLedger] = {}
    for record in records:
        own = (*record.op.input_ids, *record.reply.output_ids)
        if record.op.kind == "turn" and record.op.session is not None:
            ledger = ledgers.setdefault(record.op.session, SessionLedger(record.op.session))
            yield record, (*ledger.history, *own)
            ledger.apply(record)
        elif record.op.generates:
            yield record, own
