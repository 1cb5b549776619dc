"""The program and the issue: they compile for every engine and check, and say what a reader needs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from oracle_helpers import make_cell

import pytest_kvcheck
from pytest_kvcheck.findings import Finding
from pytest_kvcheck.launch.models import cache_dir
from pytest_kvcheck.operations import Plan
from pytest_kvcheck.shrink import passes
from pytest_kvcheck.shrink.emit import Launch, check_of, emit, issue, repro
from pytest_kvcheck.shrink.minimise import Minimised, Rate
from pytest_kvcheck.workloads.plan import PlanBuilder

FINDINGS = {
    "used": Finding(
        kind="K03", oracle="conservation", status="leak", headline="pool full: 40 tokens", pool="full"
    ),
    "rows": Finding(kind="K11", oracle="rows", status="leak", headline="2 of 12 request rows are gone"),
    "counts": Finding(
        kind="K19", oracle="session_arithmetic", status="mismatch", headline='cached """x\\" is 3'
    ),
    "logprobs": Finding(kind="K13", oracle="logprobs", status="mismatch", headline="off by 2.27"),
    "progress": Finding(kind="K23", oracle="liveness", status="stuck", headline="no request ends"),
}
SGLANG = Launch(
    ("/opt/env/bin/python", "-m", "sglang.launch_server", "--port", "41234", "--page-size", "16"),
    {"SGLANG_TEST_RETRACT": "1"},
    "sglang",
    "0.5.23",
)
VLLM = Launch(("python", "-m", "vllm.entrypoints.openai.api_server", "--port", "41234"), {}, "vllm", "0.32.0")


def some_plan() -> Plan:
    """Every kind of operation that a plan may have."""
    plan = PlanBuilder("test", 1, 512)
    plan.open("s0", timeout=1.5)
    plan.open("s1")
    plan.turn("s0", 20, 8)
    aborted = plan.turn("s1", [11, 12, 13], 40, expect="either")
    plan.abort(aborted, when_tokens=2)
    left = plan.generate(30, 40, expect="either", stream=False)
    plan.disconnect(left, when_tokens=1)
    plan.fence()
    plan.turn("s0", 5, 8, expect="reject", invalid="offset")
    plan.turn("s0", 5, 8, logprobs="output")
    plan.wait(0.5)
    plan.fence()
    turn = plan.turn("s0", 4, 8, expect="either")
    plan.close("s0", target=turn, when_tokens=1)
    plan.hold([plan.running(turn)])
    plan.close("s1")
    operations = passes.renumbered(
        passes.direct(Plan(workload="test", seed=1, operations=tuple(plan.operations)))
    )
    return passes.with_seeded_prompts(operations)


def made(check: str, plan: Plan | None = None) -> Minimised:
    cell = make_cell(page_size=16, max_running=12)
    rate = Rate(3, 3)
    steps = ["sessions: 40 -> 5 operations"]
    return Minimised(plan or some_plan(), cell, FINDINGS[check], rate, rate, 40, 21, 60.0, False, steps)


@pytest.mark.parametrize("launch", [SGLANG, VLLM], ids=["sglang", "vllm"])
@pytest.mark.parametrize("check", FINDINGS)
def test_every_program_compiles_and_needs_requests_only(check: str, launch: Launch) -> None:
    assert check_of(FINDINGS[check]) == check
    text = repro(made(check), launch, cached=lambda history, sent: (history - 1, history))
    tree = ast.parse(text)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"json", "random", "sys", "threading", "time", "uuid", "requests"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called - defined <= set(dir(__builtins__)) | set(__builtins__)  # type: ignore[operator,call-overload]


def test_the_operations_stand_first_and_read_as_what_they_are() -> None:
    text = repro(made("used"), SGLANG)
    body = text.split("def operations():\n")[1].split("\n\n")[0]
    assert [line.strip() for line in body.splitlines()] == [
        "op0 = open_session('s0', timeout=1.5)",
        "op1 = open_session('s1')",
        "op2 = turn('s0', ids(20, seed=2), 8, after=[op0])",
        "op3 = turn('s1', [131, 313, 288], 40, after=[op1])",
        "op4 = abort(op3, at=2)",
        "op5 = generate(ids(30, seed=5), 40, stream=False, leave_at=1)",
        "op7 = turn('s0', ids(5, seed=7), 8, after=[op2, op3, op4, op5], refuse={'offset': 1})",
        "op8 = turn('s0', ids(5, seed=8), 8, after=[op7])",
        "op9 = Operation(lambda op: time.sleep(0.5), after=[op2, op3, op4, op5])",
        "op10 = turn('s0', ids(4, seed=10), 8, after=[op8, op9])",
        "close_session('s0', after=[op8, op9], on=op10, at=1)",
        "op12 = Operation(lambda op: None, after=[op8, op9], on=op10, at=1)",
        "close_session('s1', after=[op12])",
    ]


def test_the_launch_command_is_on_the_programs_own_port() -> None:
    text = repro(made("used"), SGLANG)
    command = r"""
    SGLANG_TEST_RETRACT=1 \
      python -m sglang.launch_server \
      --port 30000 \
      --page-size 16
"""
    assert command in text
    assert "/opt/env" not in text
    assert "3 of 3 runs (95 % interval 44% to 100%)" in text.replace("\n", " ")


def test_a_synthetic_model_is_made_by_whoever_reads_it() -> None:
    model = str(cache_dir() / "tiny-llama-a65cd9077993")
    command = Launch(("/x/python", "-m", "engine", "--model-path", model), {}, "reference", "1").command()
    assert (
        command == "kvcheck models make . --only tiny-llama\npython -m engine \\\n  --model-path ./tiny-llama"
    )


def test_what_we_put_into_an_engine_is_brought_along_by_whoever_reads_it() -> None:
    stub = Path(pytest_kvcheck.__file__).parent / "engines" / "sglang_cpu" / "stub"
    command = Launch(("/x/python", "-m", "engine"), {"PYTHONPATH": str(stub)}, "sglang", "1").command()
    assert command == (
        "pip install --no-deps --target kvcheck pytest-kvcheck\n"
        "PYTHONPATH=./kvcheck/pytest_kvcheck/engines/sglang_cpu/stub \\\n  python -m engine"
    )


def test_a_turns_cached_range_is_written_where_counts_are_the_matter() -> None:
    assert "cached=(-1, 0)" in repro(
        made("counts"), SGLANG, cached=lambda history, sent: (history - 1, history)
    )
    assert "cached=(" not in repro(made("used"), SGLANG, cached=lambda history, sent: (history - 1, history))


@pytest.mark.parametrize("launch", [SGLANG, VLLM], ids=["sglang", "vllm"])
def test_stop_ids_and_samples_are_sent_where_the_plan_has_them(launch: Launch) -> None:
    plan = PlanBuilder("test", 1, 512)
    plan.open("s0")
    plan.turn("s0", 20, 8, stop_ids=(17, 30))
    plan.turn("s0", 5, 8)
    plan.generate(20, 4, stream=False, samples=3)
    text = repro(
        made("counts", Plan(workload="test", seed=1, operations=tuple(plan.operations))),
        launch,
        cached=lambda history, sent: (history - 1, history),
    )
    ast.parse(text)
    assert "8, after=[op0], stop=[17, 30])" in text
    assert "cached=(-1, 0)" in text, "how long the history is depends on the stop, but not where it ends"
    assert "stream=False, samples=3)" in text
    assert "op.others" in text
    assert "op.others" not in repro(made("counts"), launch)


def test_a_range_that_depends_on_where_a_turn_stopped_is_left_out() -> None:
    plan = PlanBuilder("test", 1, 512)
    plan.open("s0")
    plan.turn("s0", 20, 8, stop_ids=(17, 30))
    plan.turn("s0", 5, 8)
    whole = made("counts", Plan(workload="test", seed=1, operations=tuple(plan.operations)))
    assert "cached=(" not in repro(whole, SGLANG, cached=lambda held, sent: (held // 16 * 16, held))


def test_vllm_aborts_by_leaving() -> None:
    text = repro(made("used"), VLLM)
    assert "leave_at=2" in text
    assert "def abort" not in text


def test_the_issue_can_be_posted_as_it_is(tmp_path: Path) -> None:
    program = emit(tmp_path, made("used"), SGLANG)
    assert program.name == "repro.py"
    text = (tmp_path / "issue.md").read_text()
    assert text.startswith("# pool full: 40 tokens\n")
    for part in ("sglang 0.5.23", "page_size: 16", "3 of 3 runs", "--port 30000", "from 40 to", "kind K03"):
        assert part.lower() in text.lower(), part
    assert issue(made("progress"), VLLM).startswith("# no request ends")
