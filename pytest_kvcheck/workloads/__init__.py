"""The table of workloads, and how to get a plan from it. Pure data: no network, no engine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal

from pytest_kvcheck.cells import Cell
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.workloads.aborts import ABORTS, MORE_ABORTS
from pytest_kvcheck.workloads.base import Param, Workload, WorkloadContext
from pytest_kvcheck.workloads.fuzz import FUZZ
from pytest_kvcheck.workloads.lifecycle import LIFECYCLE
from pytest_kvcheck.workloads.plan import check_plan
from pytest_kvcheck.workloads.prefixes import PREFIXES
from pytest_kvcheck.workloads.pressure import PRESSURE
from pytest_kvcheck.workloads.sampling import SAMPLING
from pytest_kvcheck.workloads.sessions import SESSIONS

WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (*SESSIONS, *ABORTS, *MORE_ABORTS, *LIFECYCLE, *PRESSURE, *PREFIXES, *SAMPLING, *FUZZ)
}


def parameter_names() -> dict[str, frozenset[str]]:
    """The valid parameters of every workload, by its name."""
    return {name: frozenset(workload.params) for name, workload in WORKLOADS.items()}


def why_not(name: str, cell: Cell, params: Mapping[str, Param] | None = None) -> str | None:
    """Why the cell cannot run the workload with these parameters, in words for a skip; None: it can."""
    workload = WORKLOADS[name]
    return workload.applies(cell, {**workload.params, **(params or {})})


def make_plan(
    name: str,
    cell: Cell,
    *,
    vocab_size: int,
    seed: int,
    params: Mapping[str, Param] | None = None,
    scale: float = 1.0,
    sessions: Literal["streaming", "resent"] = "streaming",
) -> Plan:
    """The plan of a workload for a cell. ``scale`` multiplies its rounds only, never its shape.

    Raises ``KeyError`` for an unknown name, ``ValueError`` for a parameter that it does not have or that is
    not of its default's type and at least 1.
    """
    workload = WORKLOADS[name]
    for key, value in (params or {}).items():
        if key not in workload.params:
            near = difflib.get_close_matches(key, workload.params, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(workload.params) or 'none'}"
            raise ValueError(f"expected a parameter of workload {name}, found {key!r}; {hint}")
        default = workload.params[key]
        if type(value) is not type(default) or (isinstance(value, int | float) and value < 1):
            kind = type(default).__name__
            raise ValueError(f"{name}.{key}: expected {kind} of at least 1, found {value!r}")
    context = WorkloadContext(cell, vocab_size, seed, {**workload.params, **(params or {})}, scale, sessions)
    plan = workload.make(context)
    check_plan(plan.operations)
    return plan
