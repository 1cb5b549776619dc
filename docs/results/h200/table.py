#!/usr/bin/env python3
"""The tables of README.md: python table.py RESULTS.json DELTAS.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_kvcheck.report.results import CaseResult, read_results


def spread(values: dict[str, float] | None) -> str:
    return f"{values['greatest']:.2g} / {values['mean']:.2g}" if values else "-"


def said(results: list[CaseResult]) -> str:
    """Workloads by outcome, those that passed by number only."""
    words = []
    passed = sum(result.outcome == "passed" for result in results)
    if passed:
        words.append(f"{passed} passed")
    for result in results:
        if result.outcome != "passed":
            kinds = sorted({f.kind for f in result.findings if f.kind != "K00"})
            words.append(f"{result.workload}: {result.outcome} {' '.join(kinds)}".strip())
    return "; ".join(words)


def main(results: Path, deltas: Path) -> None:
    by_cell: dict[tuple[str, str], list[CaseResult]] = {}
    for result in read_results(results):
        by_cell.setdefault((result.id.partition(".yaml")[0], result.cell), []).append(result)
    rows: list[dict[str, Any]] = json.loads(deltas.read_text())
    measured = {row["cell"]: row for row in rows if row.get("workload") == "logprob-concurrent"}
    print("| matrix | cell | workloads | retracted | later turns: max / mean | first turns: max / mean |")
    print("|---|---|---|---|---|---|")
    for (matrix, cell), found in sorted(by_cell.items()):
        row = measured.get(cell, {})
        retracted = sum(result.exercised.get("retract", 0) for result in found) or "-"
        turns, first = spread(row.get("turns")), spread(row.get("first turns"))
        print(f"| {matrix} | {cell} | {said(found)} | {retracted} | {turns} | {first} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
