"""For people who write their own tests: a server of a cell, a client, and a ledger that proves the memory back.

```python
@pytest.mark.kvcheck(matrix="llama", cells=["baseline", "page-256"])
def test_my_abort(kv_client, kv_ledger):
    with kv_ledger.expect_no_leak():
        with kv_client.open_session() as session:
            session.turn([11, 12, 13], max_new_tokens=8)
```
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import LogprobMode, Operation, Plan
from pytest_kvcheck.oracles import judge
from pytest_kvcheck.oracles.base import CaseFacts
from pytest_kvcheck.rest import Bed, settle
from pytest_kvcheck.trace import OpRecord, Phase, Reply, TraceHeader, TraceWriter
from pytest_kvcheck.workloads.runner import Runner

# What two scorings of the same tokens may differ by where nothing else is known, in nats: upstream's own bound.
TOLERANCE = 0.05


class KvServer:
    """The running server of one cell. It belongs to the plugin, which stops it."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.cell: Cell = bed.cell
        self.url = bed.server.base_url
        self.engine = bed.server.engine.name
        self.version = bed.server.engine.version

    def log_tail(self, lines: int = 40) -> list[str]:
        """The last lines of the server's log."""
        return self.bed.server.log_tail(lines)


class KvClient:
    """Sends requests by token ids. Nothing raises for what a server did: read ``finish`` and ``message``."""

    def __init__(self, server: KvServer, trace: TraceWriter) -> None:
        self.server = server
        self.records: list[OpRecord] = []
        bed = server.bed
        self._runner = Runner(
            bed.server.engine, server.url, clock=bed.clock, trace=trace, alive=bed.server.alive
        )
        self._count = 0

    def operation(self, **fields: object) -> Operation:
        """An operation with a fresh id, for :meth:`run`; see ``pytest_kvcheck.operations.Operation``."""
        self._count += 1
        return Operation(id=self._count, **fields)  # type: ignore[arg-type]

    def run(self, operations: Sequence[Operation], phase: Phase = "workload") -> list[OpRecord]:
        """Run operations, all at once where ``after`` does not order them; records in order of their ends."""
        records = self._runner.run(operations, phase=phase)
        self.records += records
        return records

    def generate(self, ids: Sequence[int], max_new_tokens: int = 16, logprobs: LogprobMode = "output") -> Reply:
        """One plain request with the whole prompt."""
        return self._one(
            kind="generate", input_ids=tuple(ids), max_new_tokens=max_new_tokens, logprobs=logprobs
        )

    def score(self, ids: Sequence[int]) -> Reply:
        """The log-prob of every token of ``ids`` given what stands before it (``input_logprobs``)."""
        return self._one(kind="score", input_ids=tuple(ids), logprobs="input", stream=False)

    def open_session(self, timeout: float | None = None) -> KvSession:
        """Open a streaming session; ``timeout`` in seconds after its last turn."""
        session = KvSession(self, f"s{self._count + 1}")
        reply = self._one(kind="open", session=session.name, timeout=timeout)
        if reply.finish != "stop":
            raise AssertionError(f"{self.server.url}: expected a session, found {reply.message}")
        return session

    def _one(self, **fields: object) -> Reply:
        return self.run([self.operation(**fields)])[-1].reply


class KvSession:
    """One streaming session; a context manager that closes it."""

    def __init__(self, client: KvClient, name: str) -> None:
        self.client, self.name = client, name

    def turn(self, ids: Sequence[int], max_new_tokens: int = 16, logprobs: LogprobMode = "output") -> Reply:
        """One turn; ``ids`` are the new tokens only."""
        return self.client._one(
            kind="turn",
            session=self.name,
            input_ids=tuple(ids),
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
        )

    def close(self) -> None:
        self.client._one(kind="close", session=self.name)

    def __enter__(self) -> KvSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class KvLedger:
    """Compares what the client saw with what the server holds."""

    def __init__(self, client: KvClient) -> None:
        self.client = client

    @contextmanager
    def expect_no_leak(self) -> Iterator[None]:
        """Everything that is opened inside must be closed inside; then every slot must be back.

        Raises ``AssertionError`` with one paragraph a finding: leaks, wrong token counts, a dead server.
        """
        client, bed = self.client, self.client.server.bed
        baseline = settle(bed, client.run, None).account
        first, line = len(client.records), bed.server.log_line
        yield
        records = client.records[first:]
        still_open = {r.op.session for r in records if r.op.kind == "open"} - {
            r.op.session for r in records if r.op.kind == "close"
        }
        if still_open:
            names = ", ".join(sorted(str(name) for name in still_open))
            raise AssertionError(
                f"expect_no_leak: expected every session closed inside the block, found {names} open"
            )
        settled = settle(bed, client.run, baseline)
        facts = CaseFacts(
            cell=bed.cell,
            plan=Plan(workload="own test", seed=0, operations=tuple(r.op for r in records)),
            promises=bed.promises(),
            records=client.records[first:],
            baseline=baseline,
            idle=settled.account,
            idle_reached=settled.reached,
            idle_wait=settled.waited,
            log=bed.server.log_events(line),
            log_tail=bed.server.log_tail(),
            log_path=bed.server.log_path,
            server=bed.server.facts(),
            engine=bed.server.engine.name,
            engine_version=bed.server.engine.version,
        )
        # What could not be judged is no pass either: a ledger that cannot be read proves nothing.
        findings = [
            finding
            for finding in judge(facts)
            if finding.status not in ("unexercised", "inconclusive") or finding.oracle == "conservation"
        ]
        if findings:
            raise AssertionError("\n\n".join(finding.paragraph() for finding in findings))


@contextmanager
def client_of(bed: Bed) -> Iterator[KvClient]:
    """A client whose trace lies in a temporary folder for as long as the test runs."""
    with tempfile.TemporaryDirectory(prefix="kvcheck-") as folder:
        header = TraceHeader(cell=bed.cell.name, workload="own test", engine=bed.server.engine.name)
        with TraceWriter(Path(folder) / "trace.jsonl", header) as trace:
            yield KvClient(KvServer(bed), trace)


def assert_logprobs_match(a: Reply, b: Reply, tolerance: float = TOLERANCE) -> None:
    """The outputs of two replies have the same ids, and log-probs that differ by at most ``tolerance`` nats.

    Raises ``AssertionError`` that names the first position at which they part.
    """
    if a.output_ids != b.output_ids:
        pairs = zip(a.output_ids, b.output_ids, strict=False)
        shorter = min(len(a.output_ids), len(b.output_ids))
        at = next((place for place, (one, two) in enumerate(pairs) if one != two), shorter)
        raise AssertionError(
            f"output ids part at position {at}: {a.output_ids[at : at + 4]} and {b.output_ids[at : at + 4]} "
            f"({len(a.output_ids)} and {len(b.output_ids)} tokens)"
        )
    if a.output_logprobs is None or b.output_logprobs is None:
        raise AssertionError(
            "expected output log-probs in both replies, found none: ask with logprobs='output'"
        )
    for at, (one, two) in enumerate(zip(a.output_logprobs, b.output_logprobs, strict=True)):
        if one is None or two is None or not abs(one - two) <= tolerance:
            raise AssertionError(
                f"log-probs part at position {at} (token {a.output_ids[at]}): {one} and {two}, "
                f"expected at most {tolerance} apart"
            )
