"""What the engine tells of itself: ``/metrics``, ``/v1/loads`` and ``/server_info``, under SGLang's names."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .engine import Engine
from .memcheck import Account


@dataclass(frozen=True)
class Gauges:
    """One reading, taken between two iterations."""

    account: Account
    swa: Account | None
    running: int
    waiting: int
    sessions: int
    retracted: int
    aborted: int
    prompt: int
    generated: int
    cached: int

    @property
    def used(self) -> int:
        return used(self.account)


def used(account: Account) -> int:
    """As SGLang counts it: protected and session-held tokens included."""
    return account.total - account.available - account.evictable


def read(engine: Engine) -> Gauges:
    scheduler = engine.scheduler
    return Gauges(
        account=scheduler.check.account(),
        swa=scheduler.check.swa_account(),
        running=len(scheduler.plan.running) + (scheduler.plan.chunked is not None),
        waiting=len(scheduler.plan.waiting),
        sessions=len(scheduler.sessions.by_id),
        retracted=scheduler.plan.retracted_total,
        aborted=scheduler.aborted_total,
        prompt=scheduler.prompt_total,
        generated=scheduler.generated_total,
        cached=scheduler.cached_total,
    )


def metrics(engine: Engine, gauges: Gauges) -> str:
    """Prometheus text."""
    account, swa = gauges.account, gauges.swa or Account(0, 0, 0, 0, 0, 0)
    usage = round(gauges.used / account.total, 2)
    swa_usage = round(used(swa) / max(1, swa.total), 2)
    values: dict[str, float] = {
        "max_total_num_tokens": account.total,
        "page_size": engine.options.page_size,
        "num_pages": account.total // engine.options.page_size,
        "context_len": engine.context,
        "num_running_reqs": gauges.running,
        "num_queue_reqs": gauges.waiting,
        "token_usage": max(usage, swa_usage),
        "full_token_usage": usage,
        "swa_token_usage": swa_usage,
        "num_used_tokens": max(gauges.used, used(swa)),
        "kv_available_tokens": account.available,
        "kv_evictable_tokens": account.evictable,
        "kv_used_tokens": gauges.used,
        "max_total_num_tokens_swa": swa.total,
        "swa_available_tokens": swa.available,
        "swa_evictable_tokens": swa.evictable,
        "swa_used_tokens": used(swa),
        "num_streaming_sessions": gauges.sessions,
        "streaming_session_held_tokens": account.session_held,
    }
    counters: dict[str, float] = {
        "prompt_tokens_total": gauges.prompt,
        "generation_tokens_total": gauges.generated,
        "cached_tokens_total": gauges.cached,
        "num_retracted_requests_total": gauges.retracted,
        "num_aborted_requests_total": gauges.aborted,
    }
    name = str(engine.options.model).replace("\\", "\\\\").replace('"', '\\"')
    labels = f'{{engine_type="unified",model_name="{name}",pp_rank="0",tp_rank="0"}}'
    lines = []
    for kind, table in (("gauge", values), ("counter", counters)):
        for key, value in table.items():
            lines += [f"# TYPE sglang:{key} {kind}", f"sglang:{key}{labels} {float(value)}"]
    return "\n".join(lines) + "\n"


def loads(version: str, engine: Engine, gauges: Gauges) -> dict[str, Any]:
    total = gauges.account.total
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": gauges.running,
        "num_waiting_reqs": gauges.waiting,
        "num_used_tokens": gauges.used if gauges.swa is None else max(gauges.used, used(gauges.swa)),
        "num_total_tokens": gauges.used,
        "max_total_num_tokens": total,
        "max_running_requests": engine.options.max_running,
        "token_usage": round(gauges.used / total, 4),
    }
    now = datetime.now(UTC).isoformat()
    return {"timestamp": now, "version": version, "accelerator": None, "num_accelerators": 1, "loads": [load]}


def server_info(version: str, engine: Engine, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` are the launch flags under SGLang's names."""
    # What this engine does not take as a flag is told all the same: a client checks what it asked for.
    arguments = {"tp_size": 1, "speculative_algorithm": None, **arguments, "context_length": engine.context}
    state: dict[str, Any] = dict(arguments)
    state["effective_max_running_requests_per_dp"] = engine.options.max_running
    memory = engine.scheduler.cache.memory
    state["memory_usage"] = {
        "token_capacity": memory.full.total,
        "token_capacity_swa": memory.swa.total if memory.swa is not None else None,
    }
    if os.environ.get("SGLANG_EXPOSE_OWN_ENV_VARS"):
        state["env_vars"] = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
    return {**arguments, "version": version, "internal_states": [state]}
