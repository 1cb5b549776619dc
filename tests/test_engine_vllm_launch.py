"""How a cell becomes vLLM's command line, and what of it arrived."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_helpers import cell

from pytest_kvcheck.cells import Retract, Speculative
from pytest_kvcheck.engines import vllm_launch
from pytest_kvcheck.engines.base import LaunchInputs
from pytest_kvcheck.engines.vllm import VllmEngine
from pytest_kvcheck.engines.vllm_launch import KvGroups, expected_cached, kv_groups, misfits

CHAIN = Speculative(overlap=False)


def flags_of(**features: Any) -> dict[str, Any]:
    one = cell(**features)
    return vllm_launch.flags(one, "cpu", one.model.path, one.model.draft)


def test_features_become_flags() -> None:
    flags = flags_of(page_size=64, context_length=512, pool_tokens=4096, max_running=8, chunked_prefill=128)
    assert flags["block-size"] == 64
    assert flags["num-gpu-blocks-override"] == 65, "one more is the null block"
    assert flags["max-num-seqs"] == 8
    assert flags["max-num-batched-tokens"] == 128
    assert flags["enable-prefix-caching"] is True


def test_the_default_page_is_the_smallest_block_and_the_notes_say_so(tmp_path: Path) -> None:
    inputs = LaunchInputs(cell(), 8000, "python", "cpu", "/models/llama", None, tmp_path)
    spec = VllmEngine().launch_spec(inputs)
    assert spec.argv[spec.argv.index("--block-size") + 1] == "32"
    assert any("blocks of 32 tokens" in note for note in spec.notes)


def test_a_retract_cell_gets_the_smallest_pool_that_one_request_fits() -> None:
    flags = flags_of(context_length=512, pool_tokens=65536, retract=Retract())
    assert flags["num-gpu-blocks-override"] == 512 // 32 + 1


def test_a_pool_is_never_smaller_than_one_request() -> None:
    assert flags_of(context_length=4096, pool_tokens=1024)["num-gpu-blocks-override"] == 129


def test_without_chunks_a_step_takes_a_whole_prompt() -> None:
    flags = flags_of(chunked_prefill=None, context_length=1024)
    assert flags["enable-chunked-prefill"] is False
    assert flags["max-num-batched-tokens"] == 1024


def test_arguments_of_the_cell_replace_flags_and_none_removes_them() -> None:
    argv = vllm_launch.render(
        flags_of(args={"--block-size": 128, "seed": None, "enforce-eager": False, "x": [1, 2]})
    )
    assert argv[argv.index("--block-size") + 1] == "128"
    assert "--seed" not in argv
    assert "--no-enforce-eager" in argv
    assert argv[-3:] == ["--x", "1", "2"]


def test_a_command_of_the_cell_replaces_the_module(tmp_path: Path) -> None:
    inputs = LaunchInputs(cell(command=("vllm", "serve")), 8000, "python", "cpu", "/m", None, tmp_path)
    assert VllmEngine().launch_spec(inputs).argv[:4] == ("vllm", "serve", "--model", "/m")


def test_the_environment_has_the_leak_probe_and_the_cell_wins(tmp_path: Path) -> None:
    env = vllm_launch.environment(cell(env={"VLLM_LOG_STATS_INTERVAL": "10"}), "cpu", tmp_path)
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_LOG_STATS_INTERVAL"] == "10"
    assert "VLLM_BATCH_INVARIANT" not in env
    assert vllm_launch.environment(cell(), "cuda", tmp_path)["VLLM_BATCH_INVARIANT"] == "1"


# --- what it cannot run --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("features", "version", "reason"),
    [
        ({"page_size": 16}, "0.32.0", "multiples of 32 tokens, found page_size: 16"),
        ({"tp": 2}, "0.32.0", "found tp: 2"),
        ({"retract": Retract(), "max_running": 1}, "0.32.0", "found max_running: 1"),
        ({"speculative": Speculative()}, "0.32.0", "asynchronous scheduling"),
        ({"speculative": Speculative(version="v1", overlap=False)}, "0.32.0", "one speculative path"),
        ({"speculative": Speculative(topk=4, overlap=False)}, "0.32.0", "topk: 4"),
        (
            {"speculative": Speculative(algorithm="MAGIC", overlap=False)},
            "0.32.0",
            "no speculative algorithm MAGIC",
        ),
        ({"speculative": CHAIN}, "0.32.0", "needs model.draft"),
        ({}, "0.9.1", "came with vLLM 0.10.2"),
    ],
)
def test_a_cell_that_does_not_apply_says_why(features: dict[str, Any], version: str, reason: str) -> None:
    found = VllmEngine().unsupported(cell(**features), "cpu", version)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    "features",
    [{}, {"page_size": 256}, {"retract": Retract()}, {"speculative": CHAIN, "draft": "/models/eagle"}],
)
def test_a_cell_that_applies_is_not_skipped(features: dict[str, Any]) -> None:
    for version in ("", "0.32.0", "0.32.0.post1+cpu"):
        assert VllmEngine().unsupported(cell(**features), "cpu", version) is None


def test_smaller_blocks_and_overlap_need_a_gpu() -> None:
    assert VllmEngine().unsupported(cell(page_size=16), "cuda", "0.32.0") is None
    assert VllmEngine().unsupported(cell(speculative=Speculative(), draft="/d"), "cuda", "0.32.0") is None


# --- what arrived --------------------------------------------------------------------------------
def config(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_config": {"max_model_len": 4096},
        "cache_config": {"block_size": 32, "num_gpu_blocks": 2049, "enable_prefix_caching": True},
        "scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 512},
        "speculative_config": None,
        "parallel_config": {"tensor_parallel_size": 1},
    }
    for name, value in changes.items():
        part = next(part for part in found.values() if part and name in part)
        part[name] = value
    return found


def test_a_server_that_has_what_was_asked_fits() -> None:
    assert misfits(cell(), config(), KvGroups()) == []


@pytest.mark.parametrize(("name", "value"), [("block_size", 16), ("max_num_seqs", 256), ("num_gpu_blocks", 9)])
def test_a_flag_that_did_not_arrive_is_named(name: str, value: int) -> None:
    found = misfits(cell(), config(**{name: value}), KvGroups())
    assert len(found) == 1
    assert found[0].endswith(f"found {value}")


def test_what_the_cell_sets_by_hand_is_not_compared() -> None:
    assert misfits(cell(args={"max-num-seqs": 4}), config(max_num_seqs=4), KvGroups()) == []


def test_a_server_without_development_mode_is_told_how_to_get_it() -> None:
    found = VllmEngine().misfits(cell(), {"version": "0.32.0", "server_info": "GET /server_info: HTTP 404"})
    assert len(found) == 1
    assert "VLLM_SERVER_DEV_MODE=1" in found[0]


# --- cached tokens -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("previous", "sent", "expected"),
    [
        (53, 74, (32, 64)),  # measured: 32
        (87, 108, (64, 96)),  # measured: 64
        (65, 85, (64, 64)),
        (64, 85, (32, 64)),  # the last token was sampled, not computed: its block was never full
        (64, 65, (32, 64)),
        (5, 20, (0, 0)),
    ],
)
def test_whole_blocks_of_what_was_computed_are_cached(
    previous: int, sent: int, expected: tuple[int, int]
) -> None:
    assert expected_cached(previous, sent, cell(), 32, KvGroups()) == expected


def test_what_may_be_gone_is_not_demanded() -> None:
    assert expected_cached(100, 120, cell(retract=Retract()), 32, KvGroups()) == (0, 96)
    assert expected_cached(100, 120, cell(), 32, KvGroups(1, 3, 64)) == (0, 96)
    assert expected_cached(100, 120, cell(speculative=CHAIN), 32, KvGroups()) == (64, 96)
    # Where the last step accepted drafts across the end of a block, the block was never cached.
    assert expected_cached(129, 141, cell(speculative=CHAIN), 32, KvGroups()) == (64, 128)
    assert expected_cached(132, 144, cell(speculative=CHAIN), 32, KvGroups()) == (96, 128)
    assert expected_cached(100, 120, cell(prefix_cache=False), 32, KvGroups()) == (0, 0)


# --- models --------------------------------------------------------------------------------------
def test_layers_form_groups_that_take_blocks_separately(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    (tmp_path / "config.json").write_text(json.dumps({"sliding_window": 64, "layer_types": kinds}))
    assert kv_groups(str(tmp_path)) == KvGroups(full=1, sliding=3, window=64)
    (tmp_path / "config.json").write_text(json.dumps({"sliding_window": 64, "num_hidden_layers": 2}))
    assert kv_groups(str(tmp_path)) == KvGroups(full=0, sliding=1, window=64)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert kv_groups(str(tmp_path)) == KvGroups()
    assert kv_groups("org/model") == KvGroups()
