"""How a cell's features become vLLM's command line and environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_kvcheck.cells import Cell, DeviceName, Features
from pytest_kvcheck.engines.base import LaunchInputs, LaunchSpec
from pytest_kvcheck.engines.vllm_versions import METHODS, VERIFY_STEPS, block_size, release

# The folder of modules for vLLM's own process, and the one in it that gives sessions HTTP routes.
INJECT = Path(__file__).with_name("vllm_cpu") / "inject"
SESSIONS = "kvcheck_sessions.sessions"
MODULE = "vllm.entrypoints.openai.api_server"
# GiB; on a CPU vLLM sizes its pool by it, and refuses an override of the number of blocks beyond it.
CPU_POOL_GIB = 1


@dataclass(frozen=True, slots=True)
class KvGroups:
    """Groups of layers that take blocks of one pool separately, as vLLM forms them."""

    full: int = 1
    sliding: int = 0
    window: int = 0


def kv_groups(model: str) -> KvGroups:
    """The groups of a model folder's layers; one of full attention where there is no config to read."""
    file = Path(model) / "config.json"
    if not file.is_file():
        return KvGroups()
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not window:
        return KvGroups()
    kinds = config.get("layer_types") or ["sliding_attention"] * config.get("num_hidden_layers", 1)
    sliding, full = kinds.count("sliding_attention"), kinds.count("full_attention")
    size = min(sliding, full) or max(sliding, full)
    return KvGroups(full=-(-full // size), sliding=-(-sliding // size), window=int(window))


def least_blocks(features: Features, block: int, groups: KvGroups) -> int:
    """The smallest pool that vLLM starts with: one request of full length in every group, the null block."""
    whole = -(-features.context_length // block)
    reach = groups.window - 1 + batched_tokens(features)
    return 1 + groups.full * whole + groups.sliding * min(whole, -(-reach // block) + 1)


def pool_blocks(features: Features, block: int, groups: KvGroups) -> int | None:
    """Blocks of the pool, the null block included; None leaves the size to vLLM."""
    least = least_blocks(features, block, groups)
    if features.retract is not None:
        return least  # every second long request has to wait or to push another one out
    if features.pool_tokens is None:
        return None
    return max(least, 1 + -(-features.pool_tokens // block))


def batched_tokens(features: Features) -> int:
    """Tokens a step. vLLM wants one for each running request at least, and the drafted ones with it."""
    drafted = features.speculative.steps if features.speculative else 0
    return max(features.chunked_prefill or features.context_length, features.max_running * (1 + drafted))


def flags(cell: Cell, device: DeviceName, model: str, draft: str | None, version: str = "") -> dict[str, Any]:
    """vLLM's options without ``--``: True sets, False is ``--no-``, None is left out, a mapping is JSON."""
    want = cell.features
    block = block_size(want.page_size, device)
    out: dict[str, Any] = {
        "max-model-len": want.context_length,
        "block-size": block,
        "num-gpu-blocks-override": pool_blocks(want, block, kv_groups(model)),
        "max-num-seqs": want.max_running,
        "max-num-batched-tokens": batched_tokens(want),
        "enable-chunked-prefill": want.chunked_prefill is not None,
        "enable-prefix-caching": want.prefix_cache,
        "enable-prompt-tokens-details": True,
        "disable-uvicorn-access-log": True,
        # Ids go in and ids come out; without a tokenizer there is nothing that could turn them into text.
        "skip-tokenizer-init": True if _has_no_tokenizer(model) else None,
        "generation-config": "vllm",
        "seed": 0,
    }
    if device == "cpu":
        out["enforce-eager"] = True
    if want.tp > 1:
        out["tensor-parallel-size"] = want.tp
    if want.gpu_memory is not None:
        out["gpu-memory-utilization"] = want.gpu_memory
    if want.speculative is not None:
        out["speculative-config"] = _speculative(cell, draft)
        if (release(version) or (0, 0, 0)) >= VERIFY_STEPS:
            out["per-request-spec-decode-metrics"] = "summary"
        if device == "cuda":
            out["async-scheduling"] = want.speculative.overlap
    return out | {name.removeprefix("--"): value for name, value in cell.args.items()}


def _has_no_tokenizer(model: str) -> bool:
    folder = Path(model)
    return folder.is_dir() and not any(folder.glob("token*"))


def _speculative(cell: Cell, draft: str | None) -> dict[str, Any]:
    spec = cell.features.speculative
    assert spec is not None
    method = METHODS[spec.algorithm.upper()]
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": spec.steps, "prompt_lookup_max": 4}
    return {"method": method, "model": draft, "num_speculative_tokens": spec.steps}


def own_events(cell: Cell) -> bool:
    """Whether the cell's own arguments say what becomes of KV events; null switches them off."""
    return any(name.removeprefix("--") == "kv-events-config" for name in cell.args)


def render(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments, in their order."""
    argv: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            argv += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            argv += [f"--{name}", *map(str, value)]
        else:
            argv += [f"--{name}", str(value)]
    return argv


def environment(cell: Cell, device: DeviceName, scratch: Path) -> dict[str, str | None]:
    """Additions to the inherited environment; the cell's own come last."""
    env: dict[str, str | None] = {
        **({"PYTHONPATH": str(INJECT)} if cell.args.get("middleware") == SESSIONS else {}),
        # Without it there is no /reset_prefix_cache, /server_info or /abort_requests.
        "VLLM_SERVER_DEV_MODE": "1",
        # An engine core that died must take the server with it, or /health goes on answering 200.
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "0",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm-cache"),
        # Left from another server it would mix that one's counts into ours.
        "PROMETHEUS_MULTIPROC_DIR": None,
    }
    if cell.features.strict:
        # Feeds the counter corrupted_requests: the nearest that vLLM has to a check while it runs.
        env["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
    if device == "cpu":
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_POOL_GIB),
            # Workers of several servers pinned to the same core would starve one another.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    elif cell.features.speculative is None:
        env["VLLM_BATCH_INVARIANT"] = "1"
    if Path(cell.model.path).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return env | dict(cell.env)


def launch_spec(inputs: LaunchInputs, version: str, events: str | None = None) -> LaunchSpec:
    """How to start the cell's server; ``version`` is the installed one, "" where it is not known.

    ``events``: the endpoint that its KV events go to, None where nobody takes them.
    """
    cell = inputs.cell
    options = flags(cell, inputs.device, inputs.model, inputs.draft, version)
    if events is not None:
        options["kv-events-config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
        }
    command = list(cell.command or (inputs.python, "-m", MODULE))
    place = ["--model", inputs.model, "--host", "127.0.0.1", "--port", str(inputs.port)]
    return LaunchSpec(
        argv=(*command, *place, *render(options)),
        env=environment(cell, inputs.device, inputs.scratch),
        # Three processes import torch one after another: 25 s on a quiet machine, 200 s on a busy one.
        ready_deadline=600.0,
        notes=(*notes(cell, inputs.device, options), *_events_note(cell, events)),
    )


def notes(cell: Cell, device: DeviceName, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the server differs from the cell's words, one sentence each."""
    want = cell.features
    out = []
    if want.page_size == 1:
        block = block_size(1, device)
        out.append(f"page_size 1 (the default) runs as blocks of {block} tokens, vLLM's smallest on {device}")
    if want.retract is not None:
        out.append(
            "vLLM has no flag to retract: the pool has the least size, "
            f"{options['num-gpu-blocks-override']} blocks, so that long requests preempt each other, and while "
            "a workload runs all are preempted now and then (/reset_prefix_cache?reset_running_requests=true)"
        )
    if not want.mixed_chunk and want.chunked_prefill is not None:
        out.append(
            "vLLM always mixes prefill chunks and decodes in one batch; mixed_chunk: false has no effect"
        )
    if want.streaming_session and cell.args.get("middleware") != SESSIONS:
        out.append("vLLM's HTTP server keeps no sessions: each turn sends the whole history again")
    return tuple(out)


def _events_note(cell: Cell, events: str | None) -> tuple[str, ...]:
    if events is not None or own_events(cell) or not cell.features.prefix_cache:
        return ()
    return (
        "vLLM's KV events are off, since pyzmq is not installed beside kvcheck (the extra [events]): "
        "the owner of a leak is inferred, and its blocks are not named",
    )


def adopt(cell: Cell, config: Mapping[str, Any]) -> Cell:
    """The cell with the sizes of a running server's configuration; what that does not tell stays."""
    want = cell.features
    cache, scheduler = config.get("cache_config") or {}, config.get("scheduler_config") or {}
    blocks, block = cache.get("num_gpu_blocks"), cache.get("block_size")
    sizes = replace(
        want,
        context_length=(config.get("model_config") or {}).get("max_model_len") or want.context_length,
        pool_tokens=(blocks - 1) * block if blocks and block else want.pool_tokens,
        max_running=scheduler.get("max_num_seqs") or want.max_running,
        chunked_prefill=scheduler.get("max_num_batched_tokens") or want.chunked_prefill,
    )
    return replace(cell, features=sizes)


def misfits(cell: Cell, config: Mapping[str, Any], groups: KvGroups) -> list[str]:
    """What the server's configuration says otherwise than this cell, one sentence each.

    What the cell's own ``args`` set is the cell's business and not compared.
    """
    want, spec = cell.features, cell.features.speculative
    block = block_size(want.page_size, cell.device)
    expected: dict[str, tuple[str, str, Any]] = {
        "max-model-len": ("model_config", "max_model_len", want.context_length),
        "block-size": ("cache_config", "block_size", block),
        "num-gpu-blocks-override": ("cache_config", "num_gpu_blocks", pool_blocks(want, block, groups)),
        "enable-prefix-caching": ("cache_config", "enable_prefix_caching", want.prefix_cache),
        "max-num-seqs": ("scheduler_config", "max_num_seqs", want.max_running),
        "max-num-batched-tokens": ("scheduler_config", "max_num_batched_tokens", batched_tokens(want)),
        "speculative-config": ("speculative_config", "num_speculative_tokens", spec.steps if spec else None),
        "tensor-parallel-size": ("parallel_config", "tensor_parallel_size", want.tp),
    }
    out = []
    for flag, (part, name, value) in expected.items():
        found = (config.get(part) or {}).get(name)
        if (
            flag not in cell.args
            and value != found
            and not (flag == "num-gpu-blocks-override" and value is None)
        ):
            out.append(f"--{flag}: expected {name} {value} in the server's {part}, found {found}")
    return out


def expected_cached(
    previous: int, sent: int, cell: Cell, block: int | None, groups: KvGroups
) -> tuple[int, int]:
    """The legal ``cached_tokens`` of a resent turn (see :meth:`Engine.expected_cached`).

    Only whole blocks are cached. The last token of a turn was sampled but not computed, and the last token of a
    prompt is computed anew, so neither end counts. A block is cached when a step begins, by the tokens that are
    sure then: drafts that the last step accepts do not count. EAGLE computes the last block that hits anew.
    Where the pool is so small that requests preempt each other, and where sliding-window layers keep few
    blocks, any of it may be gone.
    """
    want = cell.features
    if not want.prefix_cache:
        return 0, 0
    size = block or block_size(want.page_size, cell.device)
    most = (sent - 1) // size * size
    drafts = want.speculative.steps if want.speculative is not None else 0
    least = min(most, max(previous - 1 - drafts, 0) // size * size)
    if want.speculative is not None and want.speculative.algorithm.upper() != "NGRAM":
        least = max(0, least - size)
    if want.retract is not None or groups.sliding:
        least = 0
    return least, most
