"""How SGLang is started, what its releases can run, and whether what was asked for arrived."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_helpers import FakeControl, cell, inputs

from pytest_kvcheck import __version__
from pytest_kvcheck.cells import Retract, Speculative
from pytest_kvcheck.client.control import Answer
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.engines.environment import package_version
from pytest_kvcheck.engines.reference import ReferenceEngine
from pytest_kvcheck.engines.sglang import STAND_IN, SglangEngine
from pytest_kvcheck.engines.sglang_versions import release


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    """Each flag of a command line with what follows it, "" behind a bare one."""
    found: dict[str, str] = {}
    for name, following in zip(argv, [*argv[1:], "--"], strict=True):
        if name.startswith("--"):
            found[name] = "" if following.startswith("--") else following
    return found


def launch(of: Any, device: Any = "cpu", model: str = "org/model") -> Any:
    return SglangEngine().launch_spec(inputs(of, device, model))


# --- command line --------------------------------------------------------------------------------------
def test_features_become_flags() -> None:
    spec = launch(
        cell(features={"page_size": 16, "chunked_prefill": 128, "mixed_chunk": True, "max_running": 8})
    )
    found = flags(spec.argv)
    assert spec.argv[:3] == ("/venv/bin/python", "-m", "sglang.launch_server")
    wanted = {
        "--port": "30123",
        "--nccl-port": "30124",
        "--page-size": "16",
        "--chunked-prefill-size": "128",
        "--enable-mixed-chunk": "",
        "--max-running-requests": "8",
        "--max-total-tokens": "65536",
        "--context-length": "4096",
        "--enable-streaming-session": "",
        "--skip-tokenizer-init": "",
        "--host": "127.0.0.1",
        "--dtype": "float32",
    }
    assert wanted.items() <= found.items()
    assert "--disable-radix-cache" not in found
    assert "--tp-size" not in found


def test_speculation_becomes_flags() -> None:
    of = cell(features={"speculative": Speculative(overlap=False, steps=2, draft_tokens=5, topk=2)})
    found = flags(launch(of).argv)
    wanted = {
        "--speculative-algorithm": "EAGLE",
        "--speculative-draft-model-path": "draft",
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "2",
        "--speculative-num-draft-tokens": "5",
        "--disable-overlap-schedule": "",
    }
    assert wanted.items() <= found.items()


def test_the_overlay_of_a_matrix_wins() -> None:
    args = {"attention-backend": "fa3", "--page-size": 64, "enable-metrics": False, "dtype": None, "x": [1, 2]}
    found = flags(launch(cell(args=args)).argv)
    assert found["--attention-backend"] == "fa3"
    assert found["--page-size"] == "64"
    assert "--enable-metrics" not in found
    assert "--dtype" not in found
    assert launch(cell(args=args)).argv[-3:] == ("--x", "1", "2")


def test_a_command_of_ones_own_gets_the_flags() -> None:
    spec = launch(cell(command=("docker", "run", "img")))
    assert spec.argv[:4] == ("docker", "run", "img", "--model-path")


def test_a_gpu_gets_no_stand_in() -> None:
    spec = launch(cell(), "cuda")
    assert "--dtype" not in flags(spec.argv)
    assert "PYTHONPATH" not in spec.env
    assert "SGLANG_USE_CPU_ENGINE" not in spec.env


# --- environment ---------------------------------------------------------------------------------------
def test_strict_cells_get_every_check_and_others_none() -> None:
    names = [
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    ]
    assert [launch(cell()).env[name] for name in names] == ["2", "1", "1"]
    assert [launch(cell(features={"strict": False})).env[name] for name in names] == ["0", "0", "0"]


def test_what_the_shell_says_about_retraction_does_not_reach_a_cell_without_it() -> None:
    assert launch(cell()).env["SGLANG_TEST_RETRACT"] is None
    env = launch(cell(features={"retract": Retract(5)})).env
    assert (env["SGLANG_TEST_RETRACT"], env["SGLANG_TEST_RETRACT_INTERVAL"]) == ("1", "5")


@pytest.mark.parametrize(("version", "value"), [("v1", "0"), ("v2", "1")])
def test_the_version_of_speculation_is_an_environment_variable(version: Any, value: str) -> None:
    env = launch(cell(features={"speculative": Speculative(version=version)}), "cuda").env
    assert env["SGLANG_ENABLE_SPEC_V2"] == value


def test_the_stand_in_comes_before_what_the_user_has_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    assert launch(cell()).env["PYTHONPATH"] == os.pathsep.join([str(STAND_IN), "theirs"])
    own = launch(cell(env={"PYTHONPATH": "mine"})).env["PYTHONPATH"]
    assert own == os.pathsep.join([str(STAND_IN), "mine"])
    assert (STAND_IN / "sitecustomize.py").is_file()


def test_a_cells_environment_wins() -> None:
    env = launch(cell(env={"SGLANG_CHECK_KV_PAGE_INVARIANTS": "0", "MORE": "1"})).env
    assert (env["SGLANG_CHECK_KV_PAGE_INVARIANTS"], env["MORE"]) == ("0", "1")


def test_nothing_is_fetched_for_a_model_that_is_here(tmp_path: Path) -> None:
    assert launch(cell(), model=str(tmp_path)).env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in launch(cell()).env


# --- releases ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5.12.post1", (0, 5, 12)),
        ("v0.5.23", (0, 5, 23)),
        ("0.6.0rc1+g12", (0, 6, 0)),
        ("", None),
        ("0.0.0", None),
        ("main", None),
    ],
)
def test_versions(text: str, expected: Any) -> None:
    assert release(text) == expected


V1, V2 = Speculative(version="v1", overlap=False), Speculative()


@pytest.mark.parametrize(
    ("features", "device", "version", "words"),
    [
        ({}, "cuda", "0.5.6", "streaming sessions came with SGLang 0.5.10"),
        ({"speculative": V2}, "cuda", "0.5.10", "refuses speculation V2"),
        ({}, "cuda", "0.5.10", "counts lent session slots twice"),
        ({"speculative": V1}, "cuda", "0.5.13", "V1 was removed"),
        ({"speculative": Speculative(overlap=False)}, "cuda", "0.5.12.post1", "by V1 where overlap: false"),
        ({"speculative": Speculative(topk=2)}, "cuda", "0.5.12.post1", "by V1 where topk > 1"),
        ({"speculative": V2}, "cpu", "0.5.23", "cannot overlap"),
        ({"mixed_chunk": True, "speculative": V2}, "cuda", "0.5.15", "turns mixed chunk off"),
        ({"tp": 2}, "cpu", "0.5.23", "one rank"),
        ({}, "cpu", "0.5.12.post1", "made for SGLang 0.5.23"),
        ({"page_size": 256, "chunked_prefill": 128}, "cuda", "", "multiple of page_size"),
        ({"prefix_cache": False}, "cuda", "", "radix cache"),
        ({"mixed_chunk": True, "speculative": Speculative(algorithm="NGRAM")}, "cuda", "0.5.23", "NGRAM"),
    ],
)
def test_what_a_release_cannot_run_has_a_reason(
    features: dict[str, Any], device: Any, version: str, words: str
) -> None:
    reason = SglangEngine().unsupported(cell(features=features), device, version)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("features", "device", "version"),
    [
        ({}, "cpu", "0.5.23"),
        ({}, "cuda", ""),
        ({}, "cuda", "0.0.0"),
        ({"strict": False}, "cuda", "0.5.10"),
        ({"speculative": V1}, "cuda", "0.5.12.post1"),
        ({"speculative": Speculative(overlap=False)}, "cpu", "0.5.23"),
        ({"streaming_session": False}, "cuda", "0.5.6"),
        ({"streaming_session": False, "prefix_cache": False}, "cuda", "0.5.23"),
    ],
)
def test_what_a_release_can_run_is_let_through(features: dict[str, Any], device: Any, version: str) -> None:
    assert SglangEngine().unsupported(cell(features=features), device, version) is None


def test_a_check_that_a_release_lacks_is_named_with_the_reason() -> None:
    engine = SglangEngine()
    engine.version = "0.5.12.post1"
    rules = engine.rules(cell(features={"speculative": Speculative(topk=2)}))
    assert "topk" in rules.lacks["busy_check"]
    assert "page_invariants" in rules.lacks
    assert {"busy_check", "page_invariants"}.isdisjoint(rules.has)
    engine.version = "0.5.23"
    assert engine.rules(cell()).lacks == {}
    assert set(engine.rules(cell(features={"strict": False})).lacks) == {
        "busy_check",
        "idle_check",
        "page_invariants",
    }


# --- what arrived --------------------------------------------------------------------------------------
def info(**changes: Any) -> dict[str, Any]:
    env = {name: value for name, value in launch(cell()).env.items() if name.startswith("SGLANG_") and value}
    base = {
        "version": "0.5.23",
        "enable_streaming_session": True,
        "page_size": 1,
        "chunked_prefill_size": 512,
        "enable_mixed_chunk": False,
        "context_length": 4096,
        "max_running_requests": 16,
        "disable_radix_cache": False,
        "tp_size": 1,
        "speculative_algorithm": None,
    }
    state = {"memory_usage": {"token_capacity": 65536, "token_capacity_swa": None}, "env_vars": env}
    return {**base, "internal_states": [state], **changes}


def test_a_server_as_asked_for_has_no_misfit() -> None:
    assert SglangEngine().misfits(cell(), info()) == []


@pytest.mark.parametrize(
    ("features", "changes", "words"),
    [
        ({}, {"page_size": 16}, "page_size: expected 1, the server says 16"),
        ({"page_size": 16}, {}, "page_size: expected 16, the server says 1"),
        ({"speculative": V2}, {}, "speculative_algorithm: expected EAGLE"),
        ({"pool_tokens": 4096}, {}, "pool_tokens: expected 4096, the server has room for 65536"),
        ({"retract": Retract(3)}, {}, "SGLANG_TEST_RETRACT: expected 1"),
        ({"strict": False}, {}, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY: expected 0"),
    ],
)
def test_what_did_not_arrive_is_told(features: Any, changes: Any, words: str) -> None:
    found = SglangEngine().misfits(cell(features=features), info(**changes))
    assert any(words in text for text in found), found


def test_a_flag_that_the_matrix_overlays_is_not_held_against_the_server() -> None:
    assert SglangEngine().misfits(cell(args={"page-size": 64}), info(page_size=64)) == []


def test_a_pool_is_rounded_down_to_pages() -> None:
    of = cell(features={"page_size": 16, "pool_tokens": 65550})
    assert SglangEngine().misfits(of, info(page_size=16)) == []


def test_a_server_that_tells_no_environment_is_not_blamed_for_it() -> None:
    state = {"memory_usage": {"token_capacity": 65536}}
    assert SglangEngine().misfits(cell(), info(internal_states=[state])) == []


# --- readiness, sessions, cached -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answers", "ready"),
    [
        ({}, False),
        ({"/ready": Answer(503)}, False),
        ({"/ready": ""}, True),
        ({"/server_info": "{}"}, True),
        ({"/ready": Answer(None, error="refused")}, False),
    ],
)
def test_readiness_asks_nothing_that_generates(answers: dict[str, Any], ready: bool) -> None:
    control = FakeControl(answers)
    assert SglangEngine().ready(control) is ready
    assert not any("health" in path for path in control.asked)


@pytest.mark.parametrize(
    ("features", "previous", "expected"),
    [
        ({}, 0, (0, 0)),
        ({}, 30, (29, 30)),
        ({"page_size": 16}, 30, (29, 30)),
        ({"page_size": 16, "streaming_session": False}, 30, (16, 30)),
        ({"page_size": 16, "streaming_session": False}, 16, (0, 16)),
        ({"prefix_cache": False, "streaming_session": False}, 30, (0, 30)),
    ],
)
def test_how_much_a_turn_may_find_cached(features: Any, previous: int, expected: tuple[int, int]) -> None:
    assert SglangEngine().expected_cached(previous, previous + 5, cell(features=features)) == expected


def test_an_abort_names_one_request_or_says_that_it_means_all() -> None:
    one, every = SglangEngine().abort_call("r1"), SglangEngine().abort_call(None)
    assert one is not None
    assert every is not None
    assert one.json == {"rid": "r1"}
    assert every.json["abort_all"] is True


# --- what is installed ---------------------------------------------------------------------------------
def test_the_version_of_an_installed_package() -> None:
    assert package_version(sys.executable, "pytest", "") == pytest.__version__


@pytest.mark.parametrize(
    ("python", "words"),
    [("/no/such/python", "/no/such/python"), (sys.executable, "found none")],
)
def test_an_engine_that_is_not_there_is_told_in_a_paragraph(python: str, words: str) -> None:
    with pytest.raises(LookupError) as caught:
        package_version(python, "no-such-package-at-all", "install it so and so")
    assert words in str(caught.value)
    assert "install it so and so" in str(caught.value)
    assert "Traceback" not in str(caught.value)


# --- the reference engine ------------------------------------------------------------------------------
def test_the_reference_engine_is_started_with_flags_that_it_knows() -> None:
    from pytest_kvcheck.reference.__main__ import parser

    of = cell("reference", plant=("retract-tail",), features={"strict": False, "page_size": 16})
    spec = ReferenceEngine().launch_spec(inputs(of))
    assert spec.argv[:3] == ("/venv/bin/python", "-m", "pytest_kvcheck.reference")
    parsed = parser().parse_args(list(spec.argv[3:]))
    assert (parsed.page_size, parsed.plant, parsed.silent) == (16, ["retract-tail"], True)
    assert "PYTHONPATH" not in spec.env


def test_the_reference_engines_version_is_the_packages() -> None:
    pytest.importorskip("torch")
    assert ReferenceEngine().installed_version(sys.executable) == f"reference-{__version__}"


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected reference, sglang or vllm, found 'trt'"):
        make_engine("trt")
