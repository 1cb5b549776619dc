#!/usr/bin/env python3
"""How far log-probs lie from one-shot replays of the same tokens: python deltas.py ARTIFACTS... > JSON

One row a trace: later session turns, first turns and plain requests apart, as count, max, mean and p99 in nats;
with the tokens per verify step and the retractions that the replies told of.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytest_kvcheck.oracles.noise import Spread
from pytest_kvcheck.oracles.references import References, compare, deltas, emitted
from pytest_kvcheck.oracles.suspicion import measure
from pytest_kvcheck.trace import OpRecord, TraceHeader, read_trace


def row(path: Path) -> dict[str, Any] | None:
    lines = list(read_trace(path))
    header = lines[0]
    records = [line for line in lines if isinstance(line, OpRecord)]
    if not isinstance(header, TraceHeader):
        return None
    references, groups = References(records), {"turns": [], "first turns": [], "plain": []}
    for one in emitted(record for record in records if record.phase == "workload"):
        kind = "plain" if one.record.op.kind == "generate" else "turns" if one.history else "first turns"
        for score in references.of(one.ids)[:1]:
            groups[kind] += deltas(compare(one, score))
    replies = [record.reply for record in records if record.phase == "workload"]
    steps = [(len(reply.output_ids), reply.spec_verify_steps) for reply in replies if reply.spec_verify_steps]
    out: dict[str, Any] = {"family": header.family, "cell": header.cell, "workload": header.workload}
    for kind, values in groups.items():
        spread = asdict(Spread.of(values))
        if values:
            out[kind] = {name: float(f"{spread[name]:.3g}") for name in ("count", "greatest", "mean", "p99")}
    floor = measure(records)
    out["floor"], out["limit"] = float(f"{floor.spread.greatest:.3g}"), float(f"{floor.limit:.3g}")
    if steps:
        out["tokens_per_verify"] = round(sum(n - 1 for n, _ in steps) / sum(s for _, s in steps), 2)
    out["retractions"] = sum(reply.retractions or 0 for reply in replies)
    return out


def main(folders: list[str]) -> None:
    rows = []
    for folder in folders:
        for path in sorted(Path(folder).rglob("trace.jsonl")):
            try:
                found = row(path)
            except (OSError, ValueError, IndexError) as error:
                found = {"trace": path.parent.name, "error": str(error)[:200]}
            if found:
                rows.append(found)
    print(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main(sys.argv[1:])
