"""Results as a run gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_kvcheck.findings import Finding, Outcome
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.trace import GaugeSample, OpRecord, PoolGauge, Reply, TraceHeader, TraceWriter

ORACLES = ["conservation", "session_arithmetic", "logprobs", "liveness", "engine_log", "residue", "exercise"]


def leak(**changes: Any) -> Finding:
    """A leak of one page by an aborted turn."""
    values: dict[str, Any] = {
        "kind": "K07",
        "oracle": "conservation",
        "status": "leak",
        "headline": "after every session was closed the full pool should have 0 used tokens, it has 256.",
        "tokens": 256,
        "pages": 1,
        "pool": "full",
        "owner": "session s3, round 2 turn 3 (aborted)",
        "evidence": ("total 32768 = available 32256 + evictable 256 + uncached 256",),
        "next_step": "kvcheck shrink .kvcheck/page-256/stress-concurrent/trace.jsonl",
        **changes,
    }
    return Finding(**values)


def result(cell: str, workload: str, outcome: Outcome = "passed", **changes: Any) -> CaseResult:
    """A result of the reference engine; a passed one was judged by every oracle."""
    values: dict[str, Any] = {
        "id": f"matrices/llama.yaml::{cell}::{workload}",
        "cell": cell,
        "workload": workload,
        "outcome": outcome,
        "engine": "reference",
        "engine_version": "0.1.0",
        "seed": 7,
        "duration_s": 1.5,
        "judged": ORACLES,
        **changes,
    }
    return CaseResult(**values)


def write_trace(path: Path, *, leaking: bool = True) -> None:
    """A trace of four sessions with three turns each, one abort and one retraction, and gauges all along."""
    header = TraceHeader(cell="page-256", workload="stress-concurrent", seed=7, engine="reference")
    number = 0
    with TraceWriter(path, header) as trace:
        for step in range(60):
            t = step * 0.1
            held = max(0, min(step, 50 - step)) * 256
            lost = 256 if leaking and step > 31 else 0
            evictable = min(step, 20) * 64
            gauge = PoolGauge(
                total=32768,
                available=32768 - held - lost - evictable,
                evictable=evictable,
                protected=512 if held else 0,
                session_held=held,
                uncached=lost,
            )
            retracted = 1 if step > 20 else 0
            trace.write(GaugeSample(t=t, source="test", pools=[gauge], retracted_total=retracted))
        for turn in range(3):
            for session in range(4):
                number += 1
                aborted = (turn, session) == (1, 3)
                op = Operation(id=number, kind="turn", session=f"s{session}", label=f"round 1 turn {turn + 1}")
                reply = Reply(finish="abort" if aborted else "length", output_ids=[1] * 16)
                start = turn * 1.6 + session * 0.15
                trace.write(OpRecord(op=op, started=start, ended=start + 1.2, reply=reply))
        abort = Operation(id=90, kind="abort", target=8, label="abort of turn 2")
        trace.write(OpRecord(op=abort, started=3.05, ended=3.06))
        for session in range(4):
            close = Operation(id=91 + session, kind="close", session=f"s{session}")
            trace.write(OpRecord(op=close, started=4.9 + session / 20, ended=5.0))
