"""Where each planted fault of the reference engine shows: the one table of it.

``kvcheck faults --measure`` and ``tests/test_planted_faults.py`` both run it. A fault without a row is a gap in
the detector's own tests, and counts as missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_kvcheck.cells import Cell, Features, Model, Retract, Speculative, WorkloadRef
from pytest_kvcheck.matrix.loader import load, resolve
from pytest_kvcheck.workloads import parameter_names

# Small, so that a case takes seconds; a prompt of several chunks and a pool of many pages still fit.
SMALL = Features(chunked_prefill=128, context_length=2048, pool_tokens=16384, max_running=12)
V1, V2 = Speculative(version="v1", overlap=False), Speculative(version="v2")
CELLS: Mapping[str, Features] = {
    "plain": SMALL,
    "page-16": replace(SMALL, page_size=16),
    "retract": replace(SMALL, retract=Retract(3)),
    "eagle-v1": replace(SMALL, speculative=V1),
    "eagle-v2": replace(SMALL, speculative=V2),
    "eagle-v2-no-overlap": replace(SMALL, speculative=replace(V2, overlap=False)),
    "eagle-v2-retract": replace(SMALL, speculative=V2, retract=Retract(3)),
    "swa": SMALL,
    "swa-page-128": replace(SMALL, page_size=128),  # a page holds the whole window of 64 tokens
}


@dataclass(frozen=True, slots=True)
class Reach:
    """A cell of :data:`CELLS`, and a workload that provokes the fault there.

    ``checks``: with the engine's own check on or off; a fault of the check itself is there only when it is on.
    ``scorer``: the engine agrees with itself, so that only another implementation shows the fault.
    """

    cell: str
    workload: WorkloadRef
    checks: tuple[str, ...] = ("on", "off")
    scorer: bool = False


# A few sessions side by side, with a few turns each.
STRESS = WorkloadRef("stress-concurrent", {"sessions": 3, "plain": 1, "turns": 4})
REACH: Mapping[str, Reach] = {
    "retract-tail": Reach("retract", STRESS),
    "stale-tail-on-next-turn": Reach("plain", WorkloadRef("nth-mid-abort")),
    "abort-queued-row": Reach("plain", WorkloadRef("queued-abort")),
    "abort-prefill-chunk": Reach("plain", WorkloadRef("prefill-abort")),
    "aborted-turn-kept-as-history": Reach("plain", WorkloadRef("nth-mid-abort")),
    "lock-never-released": Reach("plain", STRESS),
    "double-free": Reach("page-16", STRESS),
    "close-in-flight-leak": Reach("plain", WorkloadRef("close-in-flight")),
    "refusal-frees-session": Reach("plain", WorkloadRef("overlapping-turn")),
    "session-timeout-leak": Reach("plain", WorkloadRef("session-timeout")),
    "cached-tokens-off-by-one": Reach("plain", WorkloadRef("kv-inheritance")),
    "stale-kv-slot": Reach("plain", WorkloadRef("kv-inheritance")),
    "health-lies-when-stuck": Reach("plain", WorkloadRef("first-mid-abort")),
    "bonus-slot-race": Reach("eagle-v2", STRESS),
    # The finish caps the length again, and with overlap the round under way has computed the token by then.
    "bonus-claimed-twice": Reach("eagle-v2-no-overlap", WorkloadRef("kv-inheritance")),
    "overshoot-untrimmed": Reach("eagle-v2", STRESS),
    "stop-overshoot-kept": Reach("eagle-v2", WorkloadRef("stop-ids")),
    "spec-reject-slots-kept": Reach("eagle-v1", STRESS),
    "late-result-after-retract": Reach("eagle-v2-retract", STRESS),
    "partial-page-freed": Reach("page-16", STRESS),
    "lent-slot-double-count": Reach("plain", STRESS, ("on",)),
    "swa-cursor-uncapped": Reach("swa", WorkloadRef("nth-mid-abort")),
    "window-short": Reach("swa", STRESS, scorer=True),
    "rope-clamped": Reach("plain", STRESS, scorer=True),
    "swa-page-ge-window": Reach("swa-page-128", STRESS),
}


def cell_of(name: str, *, plant: tuple[str, ...] = (), silent: bool = False) -> Cell:
    """One of :data:`CELLS` on the reference engine. Raises ``KeyError`` for an unknown name."""
    features = replace(CELLS[name], strict=not silent)
    # A matrix that ships knows where the synthetic models are, in a wheel and in a checkout.
    matrix = resolve("swa" if name.startswith("swa") else "eagle_v2")
    base = load(matrix, engine="reference", device="cpu", workload_names=parameter_names())[0]
    return replace(
        base,
        name=name,
        family="faults",
        features=features,
        model=base.model if features.speculative else Model(base.model.path),
        workloads=(),
        plant=plant,
    )
