"""Plans that measure instead of load: controls, replays, re-runs of suspects, the canary, the row probe.

They are judged by their labels and token ids (``oracles/logprobs.py``, ``rows.py``, ``liveness.py``). Each kind
takes its operation ids from a range of its own, so that all records of a case can stand in one trace.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from pytest_kvcheck.cells import Cell, Features
from pytest_kvcheck.operations import Operation, Plan
from pytest_kvcheck.oracles.references import ByPrefix, Emitted, References, emitted
from pytest_kvcheck.oracles.suspicion import Suspect
from pytest_kvcheck.trace import FINISHED, OpRecord
from pytest_kvcheck.workloads.plan import SPECIAL_IDS

CONTROL, REPLAY, CONFIRM, CANARY, ROWS, SELF_TEST, PINS = (n * 1_000_000 for n in range(1, 8))
OVERWRITE = 9_000_000  # 8 is the harness's own (rest.py)
CONTROL_TOKENS = 12
BATCH = 6
CONFIRMED, SCORED_AGAIN, COMPANY = 4, 3, 12
ROW_TOKENS = (16, 48)
ROW_DEADLINE = 300.0
# A probe of all rows of a large server would be a load of its own.
MOST_ROWS = 64
MOST_PINS = 32
# Tokens; to overwrite a larger pool would be a load of its own.
MOST_OVERWRITTEN = 200_000
LARGEST_DEFAULT_BLOCK = 64


class _Chain:
    """Collects operations; each starts when the one before it has ended, unless it says otherwise."""

    def __init__(self, start_id: int) -> None:
        self.operations: list[Operation] = []
        self._next = start_id
        self._after: tuple[int, ...] = ()

    def add(self, op: Operation) -> None:
        self._append(op, self._after)
        self._after = (self.operations[-1].id,)

    def together(self, ops: Iterable[Operation]) -> None:
        """All of them at once, after what stands before and before what follows."""
        first = len(self.operations)
        for op in ops:
            self._append(op, self._after)
        self._after = tuple(op.id for op in self.operations[first:]) or self._after

    def paced(self, ops: Iterable[Operation]) -> None:
        """One by one, each as soon as the one before it has shown a token."""
        after = self._after
        for op in ops:
            self._append(op, after)
            running = Operation(id=0, kind="barrier", target=self.operations[-1].id, when_tokens=1)
            self._append(running, after)
            after = (self.operations[-1].id,)

    def _append(self, op: Operation, after: tuple[int, ...]) -> None:
        fields = {name: getattr(op, name) for name in op.__struct_fields__}
        self.operations.append(Operation(**{**fields, "id": self._next, "after": after}))
        self._next += 1

    def plan(self, name: str, seed: int = 0) -> Plan:
        return Plan(workload=name, seed=seed, operations=tuple(self.operations))


def _generate(ids: Sequence[int], tokens: int, label: str, deadline: float = 120.0) -> Operation:
    return Operation(
        id=0,
        kind="generate",
        input_ids=tuple(ids),
        max_new_tokens=tokens,
        logprobs="output",
        label=label,
        deadline=deadline,
    )


def _score(ids: Sequence[int], label: str, session: str | None = None, target: int | None = None) -> Operation:
    return Operation(
        id=0,
        kind="score",
        input_ids=tuple(ids),
        logprobs="input",
        session=session,
        target=target,
        label=label,
        stream=False,
    )


def _prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(SPECIAL_IDS, vocab - SPECIAL_IDS) for _ in range(length)]


def _pages(tokens: int, features: Features) -> int:
    return -(-tokens // features.page_size) * features.page_size


def _fit(count: int, tokens: int, features: Features) -> int:
    """How many requests of ``tokens`` tokens run at once with half of the pool to spare."""
    pool = features.pool_tokens
    return count if pool is None else max(1, min(count, pool // (2 * _pages(tokens, features))))


def control_plan(cell: Cell, vocab: int, seed: int, start_id: int = CONTROL) -> Plan:
    """The controls of one launch, all plain requests with prompts of their own; run it in phase ``control``.

    Serial and again from the cache, then side by side, then two scorings of the same prompts. Their outputs are
    scored by :func:`replay_plan` afterwards: decode against prefill is the matched control of a session's turn.
    Lengths step over a page and a chunk where the cell is large enough.
    """
    rng, features = random.Random(f"control {seed}"), cell.features
    room = max(8, min(features.context_length // 2, 640))
    lengths = [
        min(room, wanted) for wanted in (11, 64, features.page_size + 3, (features.chunked_prefill or 96) + 5)
    ]
    chain = _Chain(start_id)
    prompts = [_prompt(rng, length, vocab) for length in lengths]
    for how in ("serial", "hit"):
        for number, ids in enumerate(prompts):
            chain.add(_generate(ids, CONTROL_TOKENS, f"control {how} {number}"))
    batch = _fit(min(BATCH, features.max_running), max(lengths) + CONTROL_TOKENS, features)
    chain.together(
        _generate(
            _prompt(rng, lengths[number % len(lengths)], vocab), CONTROL_TOKENS, f"control batched {number}"
        )
        for number in range(batch)
    )
    for turn in ("first", "again"):
        for number, ids in enumerate(prompts[1:3]):
            chain.add(_score(ids, f"control cold {number} {turn}"))
    return chain.plan("control", seed)


def replay_plan(
    records: Sequence[OpRecord],
    limit: int | None = None,
    context_length: int | None = None,
    start_id: int = REPLAY,
) -> Plan:
    """One-shot scorings, one after the other, of what clients saw; run it in phase ``replay``.

    One scoring covers a whole session (``session`` names it, ``target`` is its last turn), a plain request or
    an aborted turn that showed tokens. What ``records`` already hold a scoring of is left out. With more than
    ``limit`` to score, half of the places go to what was retracted, aborted or followed an abort, and the rest
    is spread evenly over the workload. Give ``start_id`` where it is run more than once for one trace.
    """
    targets = histories(records, References(records), limit, context_length)
    chain = _Chain(start_id)
    for one in targets:
        op = one.record.op
        chain.add(_score(one.ids, f"replay of {op.label or op.id}", op.session, op.id))
    return chain.plan("replay")


def histories(
    records: Sequence[OpRecord],
    scored: References,
    limit: int | None = None,
    context_length: int | None = None,
) -> list[Emitted]:
    """The longest sequences that together hold every emitted one and are not in ``scored``, in order of time;
    at most ``limit`` of them, chosen as :func:`replay_plan` says."""
    targets = _targets(records, scored, context_length)
    if limit is not None and len(targets) > limit:
        targets = _choose(targets, _troubled(records), limit)
    return targets


def _targets(records: Sequence[OpRecord], scored: References, context_length: int | None) -> list[Emitted]:
    longest: ByPrefix[Emitted] = ByPrefix()
    found: list[Emitted] = []
    for one in sorted(emitted(records), key=lambda one: -len(one.ids)):
        too_long = context_length is not None and len(one.ids) >= context_length
        if too_long or longest.of(one.ids) or scored.of(one.ids) or one.record.phase == "probe":
            continue
        longest.add(one.ids, one)
        found.append(one)
    order = {record.op.id: at for at, record in enumerate(records)}
    return sorted(found, key=lambda one: order[one.record.op.id])


def _troubled(records: Sequence[OpRecord]) -> set[int]:
    """Operations that were retracted or aborted, and every later one of such a session."""
    sessions: set[str] = set()
    found: set[int] = set()
    for record in records:
        session = record.op.session
        if record.reply.retractions or (record.op.generates and record.reply.finish not in FINISHED):
            found.add(record.op.id)
            if session is not None:
                sessions.add(session)
        elif session in sessions:
            found.add(record.op.id)
    return found


def _choose(targets: list[Emitted], troubled: set[int], limit: int) -> list[Emitted]:
    first = _spread([one for one in targets if one.record.op.id in troubled], (limit + 1) // 2)
    chosen = {one.record.op.id for one in first}
    rest = _spread([one for one in targets if one.record.op.id not in chosen], limit - len(first))
    chosen |= {one.record.op.id for one in rest}
    return [one for one in targets if one.record.op.id in chosen]


def _spread(targets: list[Emitted], count: int) -> list[Emitted]:
    """``count`` of the targets, evenly over the list, its ends included."""
    if len(targets) <= count or count <= 0:
        return targets if count > 0 else []
    if count == 1:
        return targets[-1:]
    step = (len(targets) - 1) / (count - 1)
    return [targets[round(at * step)] for at in range(count)]


def confirm_plan(suspects: Sequence[Suspect], start_id: int = CONFIRM) -> Plan:
    """Re-runs of the worst suspects; run it in phase ``control``, then :func:`replay_plan` for its outputs.

    All suspects of one session are scored three times more at once, and the first of them is sent as a plain
    request alone. Then all go side by side, with as much company as they had: noise that comes from the shape
    of a batch shows here, and widens the floor.
    """
    groups: dict[str | int, list[Suspect]] = {}
    for suspect in suspects:
        op = suspect.emitted.record.op
        groups.setdefault(op.session or op.id, []).append(suspect)
    chain = _Chain(start_id)
    crowd: list[tuple[tuple[int, ...], int]] = []
    company: list[OpRecord] = []
    for number, group in enumerate(list(groups.values())[:CONFIRMED]):
        first = min((suspect.emitted for suspect in group), key=lambda one: len(one.ids))
        last = max((suspect.emitted for suspect in group), key=lambda one: len(one.ids))
        for _ in range(SCORED_AGAIN):
            chain.add(_score(last.ids, f"confirm score {number}", target=last.record.op.id))
        chain.add(_generate(first.prompt, len(first.output), f"confirm serial {number}"))
        crowd.append((first.prompt, len(first.output)))
        company = max(company, *(list(suspect.neighbours) for suspect in group), key=len)
    fillers = [(other.op.input_ids, max(1, other.op.max_new_tokens)) for other in company if other.op.input_ids]
    crowd += fillers[: max(0, min(COMPANY, len(company) + 1) - len(crowd))]
    chain.together(
        _generate(ids, tokens, f"confirm batched {number}") for number, (ids, tokens) in enumerate(crowd)
    )
    return chain.plan("confirm")


def canary_plan(
    cell: Cell, vocab: int, seed: int, attempt: int = 1, when: str = "after", deadline: float = 60.0
) -> Plan:
    """One real request with a prompt that no cache holds; run it in phase ``probe``.

    ``when`` is "before" for the launch's own, which tells how long a healthy server takes. Send a second
    ``attempt`` where the first did not finish: only two failures mean stuck.
    """
    rng = random.Random(f"canary {seed} {when} {attempt}")
    length, tokens = max(1, min(12, cell.features.context_length // 4)), 8
    chain = _Chain(CANARY + 10 * attempt + (when == "before"))
    op = _generate(_prompt(rng, length, vocab), tokens, f"canary {when} {attempt}", deadline)
    chain.add(op)
    return chain.plan("canary", seed)


def row_probe_plan(cell: Cell, vocab: int, seed: int, attempt: int = 1, when: str = "after") -> Plan:
    """As many plain requests at once as the cell has request rows; run it in phase ``probe``.

    The second ``attempt`` is three times as long: a server that lacks rows runs equally few, one that is slow
    to admit requests runs more. The third comes one by one, each when the one before it runs: a scheduler may
    call a batch full by how a burst met its chunks, with rows to spare (seen: SGLang 0.5.12, mixed chunks of
    32). Without operations where pool or context do not hold that many.
    """
    features = cell.features
    rows, length = features.max_running, 8
    paced = attempt > 2
    chain = _Chain(ROWS + 10_000 * attempt + 1_000 * (when == "before"))
    # The first of a long row must still run when the last is let in, on a fast server too.
    lengths = (12 * rows, 6 * rows, ROW_TOKENS[1]) if paced else ROW_TOKENS[attempt - 1 : attempt]
    fitting = (
        n for n in lengths if length + n < features.context_length and _fit(rows, length + n, features) == rows
    )
    tokens = next(fitting, None)
    if tokens is not None and 1 < rows <= MOST_ROWS:
        rng = random.Random(f"rows {seed} {when} {attempt}")
        ops = (
            _generate(_prompt(rng, length, vocab), tokens, f"rows {when} {attempt} {number}", ROW_DEADLINE)
            for number in range(rows)
        )
        (chain.paced if paced else chain.together)(ops)
    return chain.plan("rows", seed)


def pins_plan(records: Sequence[OpRecord]) -> Plan:
    """The prompts of the workload that began from nothing, once more with one new token; run it in phase
    ``probe`` where memory is missing, before any flush.

    What they hit is cached. Where more is hit than the account calls evictable, the rest is locked, not lost.
    """
    chain = _Chain(PINS)
    roots = {r.op.input_ids for r in records if r.phase == "workload" and r.op.generates and not r.history}
    for number, ids in enumerate(_spread_ids(sorted(roots))):
        chain.add(_generate(ids, 1, f"pin {number}"))
    return chain.plan("pins")


def _spread_ids(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    step = max(1, -(-len(prompts) // MOST_PINS))
    return prompts[::step]


def overwrite_plan(cell: Cell, vocab: int, seed: int, room: int, deadline: float = 60.0) -> Plan:
    """Prompts that no cache holds, enough to overwrite all that may be: ``room`` tokens. Run it in phase
    ``probe`` where memory is missing, behind all other probes and before any flush; one operation at a time,
    and only for as long as they finish, since a server may lose memory with each.

    Without operations where that would be too much.
    """
    features = cell.features
    page = max(features.page_size, LARGEST_DEFAULT_BLOCK)  # of the default page size, an engine makes its own
    length = min(features.context_length - 2, room - page)
    chain = _Chain(OVERWRITE)
    if length > page and room <= MOST_OVERWRITTEN:
        rng = random.Random(f"overwrite {seed}")
        # Each leaves a part of its last page, which the next one takes first.
        count = room // (length - page) + 2
        ops = (_generate(_prompt(rng, length, vocab), 1, f"overwrite {at}", deadline) for at in range(count))
        chain.together(replace(op, logprobs="none") for op in ops)
    return chain.plan("overwrite", seed)


def self_test_plan(records: Sequence[OpRecord], vocab: int) -> Plan:
    """Scorings of one good request with one token of its prompt replaced; run it in phase ``replay``.

    ``logprobs.self_test`` then requires that the comparison sees it: a detector that cannot fire is none.
    """
    chain = _Chain(SELF_TEST)
    good = [one for one in emitted(records) if len(one.output) >= 4 and len(one.prompt) >= 4]
    good = [one for one in good if one.record.reply.output_logprobs and one.record.phase != "probe"]
    if good:
        one = max(good, key=lambda one: len(one.output))
        for place in (len(one.prompt) - 2, len(one.prompt) // 2):
            ids = list(one.ids)
            ids[place] = SPECIAL_IDS + (ids[place] + vocab // 2) % (vocab - 2 * SPECIAL_IDS)
            chain.add(_score(ids, f"self-test at {place}", target=one.record.op.id))
    return chain.plan("self-test")
