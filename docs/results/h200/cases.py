#!/usr/bin/env python3
"""Ids of a matrix's cases, each configuration and workload once: python cases.py [--without RESULTS] MATRIX...

The shipped matrices share cells, and a repeat costs time on a lent GPU. Skipped cells stay: they say why.
``--without`` leaves out the cases that passed in an artifacts folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_kvcheck.matrix.loader import load
from pytest_kvcheck.report.results import read_results
from pytest_kvcheck.workloads import parameter_names


def main(matrices: list[str]) -> None:
    seen: set[tuple[str, str]] = set()
    passed: set[str] = set()
    if matrices[0] == "--without":
        passed = {result.id for result in read_results(Path(matrices[1])) if result.outcome == "passed"}
        matrices = matrices[2:]
    for matrix in matrices:
        names = parameter_names()
        for cell in load(
            Path(matrix), engine="sglang", device="cuda", workload_names=names, plant=(), silent=False
        ):
            for workload in cell.workloads:
                if (cell.launch_key, workload.name) not in seen:
                    seen.add((cell.launch_key, workload.name))
                    case = f"{matrix}::{cell.name}::{workload.name}"
                    if case not in passed:
                        print(case)


if __name__ == "__main__":
    main(sys.argv[1:])
