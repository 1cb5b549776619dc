"""The adapter for SGLang: how to start a release, speak to it and read its account."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pytest_kvcheck.cells import Cell, DeviceName
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines import sglang_gauges, sglang_logs, sglang_versions, sglang_wire
from pytest_kvcheck.engines.base import Call, Engine, LaunchInputs, LaunchSpec, ReplyParser, Rules
from pytest_kvcheck.engines.environment import package_version, precision_of
from pytest_kvcheck.observe.logs import LogEvent, LogRule
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import GaugeSample

STRICT_ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
# In the block of ports that is leased for the server.
NCCL_PORT = 1
STAND_IN = Path(__file__).parent / "sglang_cpu" / "stub"
# Set by us or by nobody: what the shell that started pytest holds must not change what a cell means.
OWN_ENV = (*STRICT_ENV, "SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL", "SGLANG_ENABLE_SPEC_V2")


class SglangEngine(Engine):
    """SGLang 0.5.11 and newer in full; older releases as far as :mod:`sglang_versions` says."""

    name: ClassVar[str] = "sglang"
    own_checks: ClassVar[tuple[str, ...]] = tuple(STRICT_ENV)

    def __init__(self) -> None:
        super().__init__()
        # Both from the server's own account of itself; see identify().
        self.swa = False
        self.incremental = False
        self._sessions = True
        self._tells_swa = True

    # --- start -----------------------------------------------------------------------------------
    def unsupported(self, cell: Cell, device: DeviceName, version: str) -> str | None:
        return sglang_versions.unsupported(cell, device, version)

    def installed_version(self, python: str) -> str:
        return package_version(
            python,
            "sglang",
            "give the interpreter of SGLang's own environment with --kvcheck-python; "
            "`python -m pytest_kvcheck.engines.sglang_cpu.install` makes one for machines without a GPU",
        )

    def launch_spec(self, inputs: LaunchInputs) -> LaunchSpec:
        cell = inputs.cell
        command = cell.command or (inputs.python, "-m", "sglang.launch_server")
        flags = self.flags(inputs) | {name.removeprefix("--"): value for name, value in cell.args.items()}
        # A process that dies is seen at once; the deadline is for one that hangs. Importing it all on a busy
        # machine has taken three minutes.
        return LaunchSpec((*command, *as_argv(flags)), self.environment(inputs), ready_deadline=600.0)

    def flags(self, inputs: LaunchInputs) -> dict[str, Any]:
        """Flags without their dashes; True is a bare flag, False and None leave it out."""
        return {
            **self.common_flags(inputs),
            # Left to itself it takes a free port of 22000 to 29999 and binds it late: by then it may be taken.
            "nccl-port": inputs.port + NCCL_PORT,
            "skip-server-warmup": True,
            "decode-log-interval": 1,
            "enable-cache-report": True,
            "log-level": "info",
            "mem-fraction-static": inputs.cell.features.gpu_memory or (0.5 if inputs.device == "cpu" else None),
            **(CPU_FLAGS if inputs.device == "cpu" else {}),
        }

    @staticmethod
    def common_flags(inputs: LaunchInputs) -> dict[str, Any]:
        """What the reference engine understands as well."""
        want = inputs.cell.features
        spec = want.speculative
        flags: dict[str, Any] = {
            "model-path": inputs.model,
            "host": "127.0.0.1",
            "port": inputs.port,
            "device": inputs.device,
            "skip-tokenizer-init": True,
            "random-seed": 1,
            "enable-metrics": True,
            "enable-streaming-session": want.streaming_session,
            "page-size": want.page_size,
            "chunked-prefill-size": want.chunked_prefill or -1,
            "enable-mixed-chunk": want.mixed_chunk,
            "context-length": want.context_length,
            "max-total-tokens": want.pool_tokens,
            "max-running-requests": want.max_running,
            "disable-radix-cache": not want.prefix_cache,
            "tp-size": want.tp if want.tp > 1 else None,
        }
        if spec:
            flags |= {
                "speculative-algorithm": spec.algorithm,
                "speculative-draft-model-path": inputs.draft,
                "speculative-num-steps": spec.steps,
                "speculative-eagle-topk": spec.topk,
                "speculative-num-draft-tokens": spec.draft_tokens,
                "disable-overlap-schedule": not spec.overlap,
            }
        return flags

    def environment(self, inputs: LaunchInputs) -> dict[str, str | None]:
        env = self.common_env(inputs)
        if Path(inputs.model).is_dir():
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if inputs.device == "cpu":
            env |= CPU_ENV
        env |= inputs.cell.env
        if inputs.device == "cpu":
            path = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_IN), path)))
        return env

    @staticmethod
    def common_env(inputs: LaunchInputs) -> dict[str, str | None]:
        """What the reference engine understands as well."""
        want = inputs.cell.features
        env: dict[str, str | None] = dict.fromkeys(OWN_ENV)
        env |= STRICT_ENV if want.strict else dict.fromkeys(STRICT_ENV, "0")
        env["SGLANG_EXPOSE_OWN_ENV_VARS"] = "1"
        if want.retract:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(want.retract.interval)}
        if want.speculative:
            env["SGLANG_ENABLE_SPEC_V2"] = "1" if want.speculative.version == "v2" else "0"
            env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        return env

    def ready(self, control: Control) -> bool:
        # Not /health: that runs a request when the server is idle, and waits for it. A server that is
        # loading refuses connections; 0.5.23 has /ready besides.
        answer = control.get("/ready", timeout=2)
        if answer.status == 404:
            answer = control.get("/server_info", timeout=2)
        return answer.ok

    def identify(self, control: Control) -> dict[str, Any]:
        """``/server_info`` as it came, with its first ``internal_states`` entry; {} where none came."""
        try:
            info = control.get("/server_info").json()
        except ValueError:
            return {}
        if not isinstance(info, dict):
            return {}
        if "context_length" in info and info["context_length"] is None:  # no flag; the model's own holds
            info["context_length"] = _context_of_model(control)
        self.version = str(info.get("version") or "")
        self.incremental = info.get("incremental_streaming_output") is True
        self._sessions = info.get("enable_streaming_session") is True
        memory = _memory(info)
        self.swa = bool(memory.get("token_capacity_swa"))
        self._tells_swa = "token_capacity_swa" in memory
        return info

    def misfits(self, cell: Cell, info: Mapping[str, Any]) -> list[str]:
        if not info:
            return ["/server_info: expected the server's configuration, found no JSON object"]
        want, spec = cell.features, cell.features.speculative
        expected: dict[str, Any] = {
            "enable_streaming_session": want.streaming_session,
            "page_size": want.page_size,
            "chunked_prefill_size": want.chunked_prefill or -1,
            "enable_mixed_chunk": want.mixed_chunk,
            "context_length": want.context_length,
            "max_running_requests": want.max_running,
            "disable_radix_cache": not want.prefix_cache,
            "tp_size": want.tp,
            "speculative_algorithm": spec.algorithm if spec else None,
        }
        if spec:
            expected |= {
                "speculative_num_steps": spec.steps,
                "speculative_eagle_topk": spec.topk,
                "speculative_num_draft_tokens": spec.draft_tokens,
            }
            if not spec.overlap:
                expected["disable_overlap_schedule"] = True
        overlaid = {name.removeprefix("--").replace("-", "_") for name in cell.args}
        out = [
            f"{name}: expected {value}, the server says {info[name]}"
            for name, value in expected.items()
            if name in info and name not in overlaid and info[name] != value
        ]
        # A server that knows nothing of a feature runs without it, which is what None, False and 1 mean.
        out += [
            f"{name}: expected {value}, the server does not say"
            for name, value in expected.items()
            if name not in info and value not in (None, False, 1)
        ]
        capacity = _memory(info).get("token_capacity", info.get("max_total_num_tokens"))
        if want.pool_tokens and "max_total_tokens" not in overlaid and isinstance(capacity, int):
            rounded = want.pool_tokens // want.page_size * want.page_size
            if capacity != rounded:
                out.append(f"pool_tokens: expected {rounded}, the server has room for {capacity}")
        return out + self._env_misfits(cell, info)

    def adopt(self, cell: Cell, info: Mapping[str, Any]) -> Cell:
        want, state = cell.features, _state(info)
        chunk = info.get("chunked_prefill_size", want.chunked_prefill)
        rows = state.get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
        capacity = _memory(info).get("token_capacity") or info.get("max_total_num_tokens")
        sizes = replace(
            want,
            context_length=info.get("context_length") or want.context_length,
            pool_tokens=capacity or want.pool_tokens,
            max_running=rows or want.max_running,
            chunked_prefill=None if chunk == -1 else chunk,
        )
        return replace(cell, features=sizes)

    def _env_misfits(self, cell: Cell, info: Mapping[str, Any]) -> list[str]:
        arrived = _state(info).get("env_vars")
        if not isinstance(arrived, dict):
            return []  # before 0.5.23 a server does not tell
        wanted = dict(STRICT_ENV) if cell.features.strict else dict.fromkeys(STRICT_ENV, "0")
        if cell.features.retract:
            wanted |= {
                "SGLANG_TEST_RETRACT": "1",
                "SGLANG_TEST_RETRACT_INTERVAL": str(cell.features.retract.interval),
            }
        wanted |= {name: value for name, value in cell.env.items() if name in arrived or name in wanted}
        return [
            f"{name}: expected {value} in the server's environment, found {arrived.get(name, 'nothing')}"
            for name, value in wanted.items()
            if arrived.get(name) != value
        ]

    def rules(self, cell: Cell) -> Rules:
        lacks = sglang_versions.lacks(cell, self.version)
        return Rules(
            sessions="streaming" if cell.features.streaming_session else "resent",
            stale_when_idle=True,
            refresh_tokens=2,
            has=frozenset(GAUGES_AND_CHECKS) - lacks.keys(),
            lacks=lacks,
        )

    def precision(self, info: Mapping[str, Any]) -> str:
        return precision_of(info.get("dtype"), info.get("quantization"), info.get("kv_cache_dtype"))

    # --- requests --------------------------------------------------------------------------------
    def open_call(self, op: Operation, session_id: str) -> Call | None:
        return sglang_wire.open_call(session_id, op.timeout) if self._sessions else None

    def close_call(self, session_id: str) -> Call | None:
        return Call("POST", "/close_session", {"session_id": session_id}) if self._sessions else None

    def request_call(self, op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call:
        return sglang_wire.request_call(op, rid, session_id if self._sessions else None, history)

    def reply_parser(self, op: Operation, history: int) -> ReplyParser:
        return sglang_wire.SglangParser(op, self._sessions, self.incremental)

    def abort_call(self, rid: str | None) -> Call | None:
        return Call("POST", "/abort_request", {"rid": rid} if rid else {"rid": "", "abort_all": True})

    def flush_call(self) -> Call:
        return Call("POST", "/flush_cache")

    def expected_cached(self, previous: int, sent: int, cell: Cell) -> tuple[int, int]:
        """A session keeps all but, at times, the last sampled token; a prefix cache keeps whole pages of it."""
        if not previous:
            return 0, 0
        if cell.features.streaming_session:
            return previous - 1, previous
        page = cell.features.page_size
        return ((previous - 1) // page * page if cell.features.prefix_cache else 0), previous

    # --- observation -----------------------------------------------------------------------------
    def log_rules(self) -> Sequence[LogRule]:
        return sglang_logs.RULES

    def sample(self, control: Control, t: float) -> GaugeSample:
        return sglang_gauges.read_loads(control, t, self.swa)

    def account(self, control: Control, t: float, recent: Sequence[LogEvent]) -> GaugeSample:
        if not self._tells_swa and not self.swa:
            # Before 0.5.23 only the gauges show a window pool, and those only after the first batch.
            answer = control.get("/metrics")
            self.swa = any(sglang_gauges.parse_metrics(answer.text, SWA_GAUGES).values())
        golden = sglang_versions.golden_gauges(self.version, swa=self.swa, sessions=self._sessions)
        return sglang_gauges.read_account(control, t, recent, golden, self.swa)


CPU_FLAGS: dict[str, Any] = {
    # float32: the least noise between a cached and a fresh computation, and as fast as bfloat16 there.
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
}
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_DISABLE_TORCHVISION": "1",
    "TRITON_INTERPRET": "1",
    # Threads of several servers on few cores cost more than they give, and one thread adds up in one order.
    "OMP_NUM_THREADS": "1",
}
SWA_GAUGES = {"swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens"}
# Names of Rules.has: fields of gauge samples, and the engine's own checks.
GAUGES_AND_CHECKS = (
    "used",
    "available",
    "evictable",
    "session_held",
    "sessions",
    "swa",
    "busy_check",
    "idle_check",
    "page_invariants",
)


def as_argv(flags: Mapping[str, Any]) -> list[str]:
    """``{"page-size": 16, "enable-metrics": True, "x": None}`` -> ``--page-size 16 --enable-metrics``."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if isinstance(value, (list, tuple)):
            argv += [str(one) for one in value]
        elif value is not True:
            argv.append(str(value))
    return argv


def _context_of_model(control: Control) -> int | None:
    """The context of a server that was started without that flag; None where it does not tell."""
    try:
        size = control.get("/v1/models").json()["data"][0]["max_model_len"]
    except (ValueError, LookupError, TypeError):
        return None
    return size if isinstance(size, int) else None


def _state(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scheduler's own state: the first rank's."""
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else None
    return first if isinstance(first, dict) else {}


def _memory(info: Mapping[str, Any]) -> Mapping[str, Any]:
    memory = _state(info).get("memory_usage")
    return memory if isinstance(memory, dict) else {}
