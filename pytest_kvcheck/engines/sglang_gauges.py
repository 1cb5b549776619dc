"""SGLang's own account over HTTP: ``/v1/loads`` (fresh, coarse) and ``/metrics`` (split by pool, may be stale).

``/metrics`` moves with a batch, and at the change from busy to idle in newer releases; what changes at idle
(a session closed) shows only after the next request of two output tokens or more, or after 30 s: a prefill
alone refreshes the pool's gauges, not the sessions'. ``/v1/loads`` is right at once but knows one sum.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pytest_kvcheck.client.control import Control
from pytest_kvcheck.observe.logs import LogEvent
from pytest_kvcheck.trace import GaugeSample, PoolGauge

# How long two sources may take to agree before the fresher one is believed alone.
AGREE_TRIES, AGREE_PAUSE = 5, 0.2
COUNTERS = ("num_retracted_requests_total", "num_aborted_requests_total")


def read_loads(control: Control, t: float, swa: bool) -> GaugeSample:
    """Running, waiting and used from ``/v1/loads`` (SGLang 0.5.10 and newer), summed over ranks."""
    sample = GaugeSample(t=t, source="/v1/loads")
    answer = control.get("/v1/loads?include=core")
    if not answer.ok:
        sample.error = f"/v1/loads: {answer.error or f'HTTP {answer.status}'}"
        return sample
    try:
        body = answer.json()
    except ValueError as error:
        sample.error = f"/v1/loads: {error}"
        return sample
    ranks = body.get("loads") if isinstance(body, dict) else body
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks) or not ranks:
        sample.error = f"/v1/loads: expected the loads of at least one rank, found {answer.text[:120]!r}"
        return sample
    sample.running = _sum(ranks, "num_running_reqs")
    sample.waiting = _sum(ranks, "num_waiting_reqs")
    if not swa:  # of two pools this is the greater sum, which belongs to neither
        used, total = _sum(ranks, "num_used_tokens"), _sum(ranks, "max_total_num_tokens")
        sample.pools = [PoolGauge(pool="full", total=total, used=used)]
    return sample


def read_account(
    control: Control, t: float, recent: Sequence[LogEvent], golden: Sequence[str], swa: bool
) -> GaugeSample:
    """The fullest account: both sources, and the split of the last busy line where it is of the same moment."""
    for left in range(AGREE_TRIES, 0, -1):
        loads = read_loads(control, t, swa)
        answer = control.get("/metrics")
        metrics = parse_metrics(answer.text, {*golden, *COUNTERS}) if answer.ok else {}
        full = loads.pool("full")
        if full is None or full.used == metrics.get("kv_used_tokens", full.used) or left == 1:
            break
        time.sleep(AGREE_PAUSE)

    sample = GaugeSample(
        t=t,
        source=f"{loads.source} + /metrics",
        running=loads.running if loads.running is not None else metrics.get("num_running_reqs"),
        waiting=loads.waiting if loads.waiting is not None else metrics.get("num_queue_reqs"),
        sessions=_sessions(metrics, recent),
        retracted_total=metrics.get("num_retracted_requests_total"),
        aborted_total=metrics.get("num_aborted_requests_total"),
        error=loads.error,
    )
    if answer.ok:
        sample.missing = [f"sglang:{name}" for name in golden if name not in metrics]
    else:
        advice = "; the server needs --enable-metrics" if answer.status == 404 else ""
        sample.error = f"/metrics: {answer.error or f'HTTP {answer.status}'}{advice}. {sample.error}".strip()
    idle = sample.running == sample.waiting == 0
    sample.pools = [_full_pool(full, metrics, idle, recent)]
    if swa:
        sample.pools.append(_swa_pool(metrics, idle, recent))
    return sample


def parse_metrics(text: str, names: set[str]) -> dict[str, int]:
    """Values of ``sglang:NAME`` for these names: summed over data-parallel ranks, of the first rank in each.

    Lines that are no metric are passed over: what they should have said is missing, and named as such.
    """
    wanted = tuple(f"sglang:{name}" for name in names)
    values: dict[str, int] = {}
    for line in text.splitlines():
        if not line.startswith(wanted):
            continue
        try:
            found = [one for family in text_string_to_metric_families(line + "\n") for one in family.samples]
            for one in found:
                name = one.name.removeprefix("sglang:")
                first = one.labels.get("tp_rank", "0") == one.labels.get("pp_rank", "0") == "0"
                if name in names and first:
                    values[name] = values.get(name, 0) + round(one.value)
        except (ValueError, OverflowError, KeyError, IndexError):
            continue
    return values


def _full_pool(
    loads: PoolGauge | None, metrics: Mapping[str, int], idle: bool, recent: Sequence[LogEvent]
) -> PoolGauge:
    available, evictable = metrics.get("kv_available_tokens"), metrics.get("kv_evictable_tokens")
    used = metrics.get("kv_used_tokens")
    if loads is not None and loads.used is not None:
        if loads.used != used:
            available = evictable = None  # of another moment
        used = loads.used
    elif used is None:
        used = metrics.get("num_used_tokens")
    gauge = PoolGauge(
        pool="full",
        total=metrics.get("max_total_num_tokens", loads.total if loads else None),
        used=used,
        available=available,
        evictable=evictable,
        session_held=metrics.get("streaming_session_held_tokens") if available is not None else None,
    )
    if gauge.session_held is not None and used is not None and gauge.session_held > used:
        gauge = msgspec.structs.replace(gauge, session_held=None)  # from before the sessions were closed
    return _with_split(gauge, idle, recent)


def _swa_pool(metrics: Mapping[str, int], idle: bool, recent: Sequence[LogEvent]) -> PoolGauge:
    available, evictable = metrics.get("swa_available_tokens"), metrics.get("swa_evictable_tokens")
    used, total = metrics.get("swa_used_tokens"), metrics.get("max_total_num_tokens_swa")
    if total is None and available is not None and evictable is not None and used is not None:
        total = available + evictable + used  # before 0.5.23 no metric names it
    # No gauge tells how much of this pool sessions hold; where they hold nothing at all, it is nothing here.
    held = 0 if metrics.get("streaming_session_held_tokens") == 0 else None
    gauge = PoolGauge(
        pool="swa", total=total, used=used, available=available, evictable=evictable, session_held=held
    )
    return _with_split(gauge, idle, recent)


def _with_split(gauge: PoolGauge, idle: bool, recent: Sequence[LogEvent]) -> PoolGauge:
    """Adds protected, session-held and uncached, as far as the engine's own checks vouch for them.

    The pool's last busy line tells, if nothing moved since. Else, at idle, nothing is uncached; and where busy
    lines show that the strict checks are on and none of them objected, ``used`` is held by sessions or locked
    in the tree, for those checks count the same slots one by one.
    """
    lines = [event.fields for event in recent if event.meaning == "account"]
    last = next((fields for fields in reversed(lines) if fields.get("pool") == gauge.pool), None)
    if last is None or gauge.available is None:
        return gauge
    if (last["available"], last["evictable"]) == (gauge.available, gauge.evictable):
        split = {name: int(last[name]) for name in ("protected", "session_held", "uncached")}
        return msgspec.structs.replace(gauge, **split)
    objected = any(event.meaning == "leak" for event in recent)
    if idle and not objected and gauge.used is not None and gauge.session_held is not None:
        locked = gauge.used - gauge.session_held
        return msgspec.structs.replace(gauge, protected=locked, uncached=0) if locked >= 0 else gauge
    return gauge


def _sessions(metrics: Mapping[str, int], recent: Sequence[LogEvent]) -> int | None:
    """How many are open: the log says it at once, the gauge with the next decode step."""
    told = [event.fields["active"] for event in recent if "active" in event.fields]
    return int(told[-1]) if told else metrics.get("num_streaming_sessions")


def _sum(ranks: Sequence[Mapping[str, Any]], name: str) -> int | None:
    values = [rank.get(name) for rank in ranks]
    numbers = [value for value in values if type(value) is int]
    return sum(numbers) if len(numbers) == len(ranks) else None
