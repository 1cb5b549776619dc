"""vLLM's own account: what its metrics say, and its leak probe ``POST /reset_prefix_cache``.

The probe refuses while any block is referenced, and it frees nothing that is: unlike a flush elsewhere it hides
no leak. It does cost the prefix cache, so only the account at idle asks it, after the gauges were read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from pytest_kvcheck.client.control import Control
from pytest_kvcheck.trace import GaugeSample, PoolGauge

PREFIX = "vllm:"
RESET_PATH = "/reset_prefix_cache"
# How long frees may lag behind the last reply before blocks count as held, and how often we look.
SETTLE = 5.0
POLL = 0.1


class Metrics:
    """The wanted metrics of one ``/metrics`` text, summed over engines. Raises ``ValueError`` for garbage."""

    def __init__(self, text: str, wanted: Iterable[str]) -> None:
        names = "|".join(map(re.escape, wanted))
        keep = re.compile(rf"^{PREFIX}({names})[{{ ].*$", re.M)
        lines = "\n".join(line.group() for line in keep.finditer(text))
        self._samples = [
            (sample.name.removeprefix(PREFIX), sample.labels, sample.value)
            for family in text_string_to_metric_families(lines + "\n")
            for sample in family.samples
        ]
        self.names = frozenset(name for name, _, _ in self._samples)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of one metric over all engines, or None where it is absent."""
        values = [
            value for found, have, value in self._samples if found == name and labels.items() <= have.items()
        ]
        return sum(values) if values else None

    def pools(self) -> tuple[int, int, int] | None:
        """(tokens a block, usable blocks, used blocks) over all engines, or None where something is absent."""
        size = usable = used = 0
        usage = {
            have.get("engine"): value for name, have, value in self._samples if name == "kv_cache_usage_perc"
        }
        for name, have, _ in self._samples:
            if name != "cache_config_info" or have.get("engine") not in usage:
                continue
            if not (have.get("block_size", "").isdigit() and have.get("num_gpu_blocks", "").isdigit()):
                return None
            blocks = int(have["num_gpu_blocks"]) - 1  # one is the null block, which is never handed out
            size = int(have["block_size"])
            usable += blocks
            used += round(usage[have.get("engine")] * blocks)
        return (size, usable, used) if usable else None


def sample(control: Control, t: float, wanted: tuple[str, ...]) -> GaugeSample:
    """One reading of ``/metrics``; what is ``wanted`` and absent stands in ``missing``."""
    answer = control.get("/metrics")
    if not answer.ok:
        return GaugeSample(
            t=t, source="metrics", error=f"GET /metrics: {answer.error or f'HTTP {answer.status}'}"
        )
    try:
        metrics = Metrics(answer.text, wanted)
    except ValueError as error:
        return GaugeSample(
            t=t, source="metrics", error=f"GET /metrics: expected Prometheus text, found: {error}"
        )
    missing = [PREFIX + name for name in wanted if name not in metrics.names]
    pools = metrics.pools()
    if pools is None and "cache_config_info" in metrics.names and "kv_cache_usage_perc" in metrics.names:
        missing.append(f"{PREFIX}cache_config_info num_gpu_blocks")
    return GaugeSample(
        t=t,
        source="metrics",
        pools=[_pool(*pools)] if pools else [],
        running=_whole(metrics.total("num_requests_running")),
        waiting=_whole(metrics.total("num_requests_waiting")),
        retracted_total=_whole(metrics.total("num_preemptions_total")),
        aborted_total=_whole(metrics.total("request_success_total", finished_reason="abort")),
        missing=missing,
    )


def account(control: Control, t: float, wanted: tuple[str, ...]) -> GaugeSample:
    """The account at idle: the gauges once they have settled, then the leak probe.

    Where the probe refuses although the gauge says 0, one block at least is held, and that is reported.
    """
    deadline = time.monotonic() + SETTLE
    seen = sample(control, t, wanted)
    while not seen.error and not _at_rest(seen) and time.monotonic() < deadline:
        time.sleep(POLL)
        seen = sample(control, t, wanted)
    if seen.error or seen.running or seen.waiting:
        return seen
    return _probe(control, seen)


def _at_rest(seen: GaugeSample) -> bool:
    return not seen.running and not seen.waiting and not any(pool.used for pool in seen.pools)


def _probe(control: Control, seen: GaugeSample) -> GaugeSample:
    deadline = time.monotonic() + SETTLE
    held = any(pool.used for pool in seen.pools)
    while True:
        answer = control.post(RESET_PATH, timeout=30)
        if answer.status == 404:
            return seen  # not in development mode; misfits() and Rules.lacks say so
        if not answer.ok:
            seen.error = (
                f"POST {RESET_PATH}: expected an answer from the engine core, found "
                f"{answer.error or f'HTTP {answer.status}: {answer.text[:200]}'}"
            )
            return seen
        success = _success(answer.text)
        if success is not False:
            seen.source = "metrics, reset_prefix_cache succeeded" if success else "metrics"
            return seen
        # Each refusal writes a line with the count of blocks; where the gauge has told it, one is enough.
        if held or time.monotonic() >= deadline:
            break
        time.sleep(POLL)
    seen.source = "metrics, reset_prefix_cache refused"
    seen.pools = [
        pool if pool.used else PoolGauge(pool=pool.pool, total=pool.total, used=_one_block(control, pool))
        for pool in seen.pools
    ]
    return seen


def _success(text: str) -> bool | None:
    hit = re.search(r'"success"\s*:\s*(true|false)', text)
    return None if hit is None else hit[1] == "true"


def _one_block(control: Control, pool: PoolGauge) -> int:
    pools = Metrics(control.get("/metrics").text, ("cache_config_info", "kv_cache_usage_perc")).pools()
    return pools[0] if pools else 1


def _pool(size: int, usable: int, used: int) -> PoolGauge:
    return PoolGauge(pool="full", total=usable * size, used=used * size)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
