"""An engine that is wrong in the same way every time is found by another implementation, by nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracle_helpers import facts_of, make_cell
from scorer_helpers import NONE, interpreter

from pytest_kvcheck.cells import Case
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.engines.scorer import ScorerError
from pytest_kvcheck.independent import Independent
from pytest_kvcheck.judge import Bench
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.oracles.references import emitted
from pytest_kvcheck.oracles.scorer import judge_scorer
from pytest_kvcheck.reach import REACH, cell_of
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.settings import Settings, scorer_of
from pytest_kvcheck.trace import OpRecord, Phase, Reply

FAULTS = [name for name, reach in REACH.items() if reach.scorer]


# --- the reference engine against transformers ---------------------------------------------------------
def run(folder: Path, cell: str, plant: tuple[str, ...], scorer: str | None) -> CaseResult:
    workload = next(reach.workload for reach in REACH.values() if reach.scorer)
    bench = Bench(Settings(artifacts=folder, scorer=scorer, budget=3.0))
    try:
        return bench.run(Case(cell_of(cell, plant=plant), workload), "scored", last=True)
    finally:
        bench.close()


@pytest.fixture
def scorer() -> str:
    found = interpreter()
    if not found:
        pytest.skip(NONE)
    return f"transformers={found}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_consistent_fault_is_found_and_its_twin_is_silent(fault: str, scorer: str, tmp_path: Path) -> None:
    cell = REACH[fault].cell
    twin = run(tmp_path / "twin", cell, (), scorer)
    assert twin.outcome == "passed", twin.text()
    assert "scorer" in twin.judged
    found = run(tmp_path / "fault", cell, (fault,), scorer)
    assert [finding.oracle for finding in found.findings] == ["scorer"], found.text()
    (finding,) = found.findings
    assert (finding.kind, finding.status) == ("K17", "mismatch")
    assert finding.owner
    assert finding.next_step
    first = {"window-short": 64, "rope-clamped": 256}[fault]
    earliest = int(finding.evidence[3].partition("position ")[2].partition(";")[0])
    assert first <= earliest, "nothing before the window's end, or before the last angle, is wrong"


@pytest.mark.slow
def test_without_a_scorer_it_is_not_found(tmp_path: Path) -> None:
    result = run(tmp_path, "plain", ("rope-clamped",), None)
    assert result.outcome == "passed", result.text()
    assert "scorer" not in result.judged


# --- what cannot be scored is said ---------------------------------------------------------------------
def server(**info: Any) -> Any:
    return SimpleNamespace(engine=make_engine("sglang"), info={"model_path": "/nowhere/model", **info})


def history() -> list[Any]:
    return list(emitted([record("control serial 0", [-0.5], phase="control")]))


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"quantization": "fp8"}, r"the weights are quantised \(fp8\)"),
        ({"kv_cache_dtype": "fp8_e4m3"}, r"the KV cache is quantised \(fp8_e4m3\)"),
        ({"model_path": None}, "does not tell which model"),
    ],
)
def test_a_server_that_need_not_agree(info: dict[str, Any], said: str) -> None:
    with pytest.raises(ScorerError, match=said):
        Independent("transformers", None, print).score(server(**info), history())


def test_no_interpreter_has_transformers(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    scorer = Independent("transformers", str(bare), print)
    if subprocess.run([sys.executable, "-c", "import transformers"], capture_output=True).returncode == 0:
        pytest.skip("this interpreter has transformers, so there is one to fall back to")
    for _ in range(2):
        with pytest.raises(ScorerError, match="transformers=PYTHON"):
            scorer.score(server(), history())


def test_float32_is_not_rounded() -> None:
    assert (
        Independent("transformers", None, print).score(server(dtype="float32"), history(), rounded=True) == []
    )


@pytest.mark.parametrize("given", ["torch", "transformers=", "transformers=/nowhere/python"])
def test_an_option_that_names_no_scorer(given: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scorer: expected .*transformers.*, found"):
        scorer_of(given, tmp_path)


def test_an_interpreter_is_found_from_where_pytest_was_started(tmp_path: Path) -> None:
    assert scorer_of(None, tmp_path) is None
    assert scorer_of("transformers", tmp_path) == "transformers"
    (tmp_path / "python").symlink_to(sys.executable)
    assert scorer_of("transformers=./python", tmp_path) == f"transformers={tmp_path / 'python'}"


# --- the judgement -------------------------------------------------------------------------------------
IDS = tuple(range(20, 40))
TRUE = [-1.0 - 0.01 * at for at in range(10)]


def record(label: str, values: list[float], phase: Phase = "workload", number: int = 1) -> OpRecord:
    op = Operation(
        id=number,
        kind="generate",
        input_ids=(number, *IDS[:10]),
        max_new_tokens=len(values),
        logprobs="output",
        label=label,
    )
    reply = Reply(finish="length", output_ids=list(IDS[10 : 10 + len(values)]), output_logprobs=list(values))
    return OpRecord(op=op, phase=phase, reply=reply)


def scoring(of: OpRecord, values: list[float], phase: Phase, label: str = "transformers") -> OpRecord:
    ids = (*of.op.input_ids, *of.reply.output_ids)
    padded = [None, *([-3.0] * (len(of.op.input_ids) - 1)), *values]
    op = Operation(id=of.op.id + 100, kind="score", input_ids=ids, logprobs="input", label=label)
    return OpRecord(op=op, phase=phase, reply=Reply(finish="length", input_logprobs=padded))


def judged(
    seen: list[float], own: list[float], other: list[float], control: float = 1e-5, rounded: float = 0.0
) -> list[Any]:
    """A request that said ``seen``, which the engine scores as ``own`` and another implementation as ``other``;
    beside controls that differ from both by ``control``."""
    records, scored, coarse = [], [], []
    for number in range(10, 16):
        plain = record(f"control serial {number}", [value + control for value in TRUE], "control", number)
        records += [plain, scoring(plain, TRUE, "replay", "replay")]
        scored.append(scoring(plain, TRUE, "scorer"))
        if rounded:
            coarse.append(scoring(plain, [value + rounded for value in TRUE], "scorer"))
    one = record("turn", seen)
    records += [one, scoring(one, own, "replay", "replay")]
    scored.append(scoring(one, other, "scorer"))
    return judge_scorer(replace(facts_of(records, make_cell()), scored=scored, rounded=coarse))


def off(by: float) -> list[float]:
    return [value - by for value in TRUE]


def test_agreement_is_silent() -> None:
    assert judged(off(1e-5), TRUE, TRUE) == []


def test_the_engine_agrees_with_itself_alone() -> None:
    (finding,) = judged(off(0.3), off(0.3), TRUE)
    assert (finding.kind, finding.status) == ("K17", "mismatch")
    assert "off by up to 0.3" in finding.headline
    assert "1 requests differ, the earliest at position 11; 6 agree." in finding.evidence


def test_values_of_the_neighbours() -> None:
    true = [-0.1 - 0.3 * (at * 7 % 10) for at in range(10)]
    shifted = [*true[1:], -2.0]
    (finding,) = judged(shifted, shifted, true)
    assert finding.kind == "K18"
    assert "The values fit the tokens 1 place later." in finding.evidence


def test_what_the_engine_itself_disowns_is_told_by_logprobs() -> None:
    assert judged(off(0.3), TRUE, TRUE) == []


def test_rounding_to_the_engine_s_type_is_no_fault() -> None:
    assert judged(off(0.05), off(0.05), TRUE) != []
    assert judged(off(0.05), off(0.05), TRUE, rounded=0.03) == []


def test_plain_requests_that_are_wrong_too_do_not_widen_the_floor() -> None:
    (finding,) = judged(off(0.3), off(0.3), TRUE)
    widened = judged(off(0.3), off(0.3), TRUE, control=0.004)
    assert finding
    assert widened, "a small deviation of all controls explains no large one"


def test_without_scorings_there_is_nothing_to_judge() -> None:
    assert judge_scorer(facts_of([record("turn", TRUE)])) == []
