"""The oracles: a case passes only if every one of them is silent.

An oracle is one function in one file and one line in :data:`ORACLES`.
"""

from __future__ import annotations

from pytest_kvcheck.findings import SEVERITY, Finding
from pytest_kvcheck.oracles.base import CaseFacts, Oracle
from pytest_kvcheck.oracles.common import NO_KIND
from pytest_kvcheck.oracles.conservation import judge_conservation
from pytest_kvcheck.oracles.engine_log import confirm_over_count, judge_engine_log
from pytest_kvcheck.oracles.exercise import judge_exercise
from pytest_kvcheck.oracles.liveness import judge_liveness
from pytest_kvcheck.oracles.logprobs import judge_logprobs, self_test
from pytest_kvcheck.oracles.protocol import judge_protocol
from pytest_kvcheck.oracles.residue import judge_residue
from pytest_kvcheck.oracles.rows import judge_rows
from pytest_kvcheck.oracles.scorer import judge_scorer
from pytest_kvcheck.oracles.session_arithmetic import judge_session_arithmetic
from pytest_kvcheck.oracles.soak import judge_soak

# In order of trust: of two findings that are equally grave, the one that says more about the owner comes first.
ORACLES: dict[str, Oracle] = {
    "conservation": judge_conservation,
    "engine_log": judge_engine_log,
    "rows": judge_rows,
    "soak": judge_soak,
    "session_arithmetic": judge_session_arithmetic,
    "logprobs": judge_logprobs,
    "self_test": self_test,
    "scorer": judge_scorer,
    "liveness": judge_liveness,
    "protocol": judge_protocol,
    "residue": judge_residue,
    "exercise": judge_exercise,
}


def judge(facts: CaseFacts) -> list[Finding]:
    """Every finding of the case, the gravest first. Fills ``facts.exercised``.

    Never raises: an oracle that fails gives an inconclusive finding of its own, and the others go on.
    """
    found: list[Finding] = []
    for name, oracle in ORACLES.items():
        try:
            found += oracle(facts)
        except Exception as error:  # a server's nonsense must not cost the other verdicts
            found.append(_failed(name, error))
    found = confirm_over_count(facts, found)
    return sorted(found, key=lambda finding: SEVERITY.index(finding.status))


def _failed(name: str, error: Exception) -> Finding:
    return Finding(
        kind=NO_KIND,
        oracle=name,
        status="inconclusive",
        headline=f"the {name} oracle could not judge this case: {type(error).__name__}: {str(error)[:200]}",
        next_step="this is a fault of kvcheck: keep the trace and report it",
    )
