"""Building plans: ids, ordering and seeded tokens. And checking that a plan makes sense before it is run."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pytest_kvcheck.ledger import sessions
from pytest_kvcheck.operations import OVERLAP, Expect, LogprobMode, Operation
from pytest_kvcheck.trace import OpRecord

# Ids below are special tokens in most vocabularies, and models pad their vocabularies at the end.
SPECIAL_IDS = 10
MOST_STOP_IDS = 2048


class PlanBuilder:
    """Collects operations. Two rules order them, so that a workload rarely spells out ``after``:

    what is added behind a :meth:`fence` waits for all that stands before it; and the operations of one session
    follow each other. Everything else between two fences is in flight at once.
    """

    def __init__(self, workload: str, seed: int, vocab_size: int) -> None:
        if vocab_size <= 2 * SPECIAL_IDS:
            raise ValueError(f"expected a vocabulary of more than {2 * SPECIAL_IDS} tokens, found {vocab_size}")
        self.workload = workload
        self.operations: list[Operation] = []
        # A text seed goes through SHA-512: the same tokens on every machine and Python.
        self._random = random.Random(f"{workload}/{seed}")
        self._vocab_size = vocab_size
        self._fence: int | None = None  # what is added next waits for this operation
        self._complete = -1  # the last operation that all before it have ended for
        self._since: list[int] = []
        self._session_last: dict[str, int] = {}

    def ids(self, count: int) -> tuple[int, ...]:
        """``count`` random token ids, none of them special."""
        low, high = SPECIAL_IDS, self._vocab_size - SPECIAL_IDS
        return tuple(self._random.randrange(low, high) for _ in range(count))

    def stop_ids(self) -> tuple[int, ...]:
        """A random quarter of the vocabulary, of a large one as many ids as a request may well carry."""
        low, high = SPECIAL_IDS, self._vocab_size - SPECIAL_IDS
        count = max(1, min((high - low) // 4, MOST_STOP_IDS))
        return tuple(sorted(self._random.sample(range(low, high), count)))

    def between(self, low: int, high: int) -> int:
        """A random whole number, both ends included."""
        return self._random.randint(low, high)

    # --- operations: each returns its id ------------------------------------------------------------
    def open(self, session: str, timeout: float | None = None) -> int:
        return self._add(kind="open", session=session, timeout=timeout, label=f"{session} open")

    def turn(
        self,
        session: str,
        new: int | Sequence[int],
        max_new_tokens: int,
        *,
        logprobs: LogprobMode = "none",
        stream: bool = True,
        expect: Expect = "finish",
        invalid: str | None = None,
        label: str = "",
        target: int | None = None,
        when_tokens: int = 0,
        deadline: float = 120.0,
        stop_ids: tuple[int, ...] = (),
    ) -> int:
        """One turn; ``new`` is how many random tokens to append, or the tokens themselves."""
        return self._add(
            kind="turn",
            session=session,
            input_ids=self._tokens(new),
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
            stream=stream,
            expect=expect,
            invalid=invalid,
            label=label or f"{session} turn",
            target=target,
            when_tokens=when_tokens,
            deadline=deadline,
            stop_ids=stop_ids,
        )

    def generate(
        self,
        prompt: int | Sequence[int],
        max_new_tokens: int,
        *,
        logprobs: LogprobMode = "none",
        stream: bool = True,
        expect: Expect = "finish",
        label: str = "plain",
        target: int | None = None,
        when_tokens: int = 0,
        deadline: float = 120.0,
        stop_ids: tuple[int, ...] = (),
        samples: int = 1,
    ) -> int:
        """One plain request; ``prompt`` is how many random tokens it has, or the tokens themselves."""
        return self._add(
            kind="generate",
            input_ids=self._tokens(prompt),
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
            stream=stream,
            expect=expect,
            label=label,
            target=target,
            when_tokens=when_tokens,
            deadline=deadline,
            stop_ids=stop_ids,
            samples=samples,
        )

    def abort(self, target: int, when_tokens: int) -> int:
        """Abort ``target`` once it has shown ``when_tokens`` (0: once the server has it)."""
        label = f"abort at {when_tokens} tokens"
        return self._add(kind="abort", target=target, when_tokens=when_tokens, label=label)

    def disconnect(self, target: int, when_tokens: int) -> int:
        """Close the socket of ``target`` once it has shown ``when_tokens`` (0: once the server has it)."""
        label = f"disconnect at {when_tokens} tokens"
        return self._add(kind="disconnect", target=target, when_tokens=when_tokens, label=label)

    def close(self, session: str, *, target: int | None = None, when_tokens: int = 0) -> int:
        """Close a session; with ``target`` while that turn runs, once it has shown ``when_tokens``."""
        return self._add(
            kind="close", session=session, target=target, when_tokens=when_tokens, label=f"{session} close"
        )

    def wait(self, seconds: float, label: str = "") -> int:
        return self._add(kind="wait", seconds=seconds, label=label or f"wait {seconds:g} s")

    def running(self, target: int) -> int:
        """An ordering point: ``target`` has shown its first token. Follow it with :meth:`hold`."""
        return self._add(kind="barrier", target=target, when_tokens=1, label="running")

    # --- ordering ------------------------------------------------------------------------------------
    def fence(self, label: str = "") -> None:
        """All that follows waits for all that stands before."""
        if self._since:
            barrier = Operation(
                id=len(self.operations), kind="barrier", after=tuple(self._since), label=label or "all done"
            )
            self.operations.append(barrier)
            self._fence = self._complete = barrier.id
            self._since = []

    def hold(self, points: Iterable[int]) -> None:
        """All that follows waits for these operations, while others before them may still run."""
        after = tuple(points)
        barrier = Operation(id=len(self.operations), kind="barrier", after=after, label="hold")
        self.operations.append(barrier)
        self._since.append(barrier.id)
        self._fence = barrier.id

    def _tokens(self, what: int | Sequence[int]) -> tuple[int, ...]:
        return self.ids(what) if isinstance(what, int) else tuple(what)

    def _add(self, **fields: Any) -> int:
        number = len(self.operations)
        session = fields.get("session")
        after = [] if self._fence is None else [self._fence]
        # What is to hit a turn in flight (a close, a second turn that must be refused) must not wait for it.
        beside = fields.get("invalid") == OVERLAP or (
            fields["kind"] == "close" and fields.get("target") is not None
        )
        if session is not None and not beside:
            last = self._session_last.get(session)
            if last is not None and last > self._complete:
                after.append(last)
        self.operations.append(Operation(id=number, after=tuple(after), **fields))
        self._since.append(number)
        if session is not None and fields.get("invalid") != OVERLAP:
            self._session_last[session] = number
        return number


def check_plan(operations: Sequence[Operation], open_sessions: Collection[str] = ()) -> None:
    """Raises ``ValueError`` where an operation refers to what is not there, or two turns of one session could
    be in flight at once. ``open_sessions`` are open before the first operation.
    """
    opened = set(open_sessions)
    kinds: dict[int, Operation] = {}
    ancestors: dict[int, int] = {}  # operation -> bit set of the positions of all that ends before it starts
    position = {op.id: at for at, op in enumerate(operations)}
    last_turn: dict[str, Operation] = {}
    for op in operations:
        where = f"operation {op.id} ({op.kind} {op.label!r})"
        if op.id in kinds:
            raise ValueError(f"{where}: expected a new id, found that of an earlier operation")
        before = 0
        for earlier in op.after:
            if earlier not in kinds:
                raise ValueError(f"{where}: expected `after` to name earlier operations, found {earlier}")
            before |= ancestors[earlier] | 1 << position[earlier]
        waits = op.target is not None and op.kind != "score"
        if waits and op.target not in kinds:
            raise ValueError(f"{where}: expected an earlier operation as target, found {op.target}")
        if op.target is not None and waits and not kinds[op.target].generates:
            raise ValueError(f"{where}: expected a request as target, found {kinds[op.target].kind}")
        if op.kind == "disconnect" and op.target is None:
            raise ValueError(f"{where}: expected a target, found none")
        if op.samples > 1 and (op.kind != "generate" or op.stream):
            raise ValueError(f"{where}: expected several samples of a plain request only, not streamed")
        if op.kind in ("open", "turn", "close") and op.session is None:
            raise ValueError(f"{where}: expected a session, found none")
        if op.kind == "open" and op.session in opened:
            raise ValueError(f"{where}: expected a new session, found {op.session!r} again")
        if op.kind == "open":
            opened.add(str(op.session))
        if op.kind == "turn":
            session = str(op.session)
            if session not in opened:
                raise ValueError(f"{where}: expected an open of {session!r} before its first turn, found none")
            if op.invalid == OVERLAP:
                if op.expect != "reject" or op.target is None or kinds[op.target].session != session:
                    raise ValueError(
                        f"{where}: expected a turn beside another one of its session to have that as target, "
                        "and to be refused"
                    )
                kinds[op.id], ancestors[op.id] = op, before
                continue
            previous = last_turn.get(session)
            if previous is not None and not before >> position[previous.id] & 1:
                raise ValueError(
                    f"{where}: expected one turn in flight a session, found operation {previous.id} beside it"
                )
            last_turn[session] = op
        kinds[op.id] = op
        ancestors[op.id] = before


def open_sessions(records: Iterable[OpRecord]) -> list[str]:
    """The sessions that these records leave open, except those with a timeout: the server is to close them."""
    seen = list(records)
    timed = {record.op.session for record in seen if record.op.kind == "open" and record.op.timeout is not None}
    return [name for name, ledger in sessions(seen).items() if ledger.open and name not in timed]
