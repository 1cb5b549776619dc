"""The gauges of one case as drawings: what each pool holds over time, with the operations that explain it.

Only geometry is made here; the template draws it. Lengths are in the units of the drawing's view box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pytest_kvcheck.trace import GaugeSample, Line, OpRecord, PoolGauge

WIDTH, HEIGHT, LANE = 900.0, 130.0, 12.0
# Parts of a pool that are not free, from the bottom of the drawing upward: what is lost stays as a floor.
# "used" is what an engine calls used and does not divide further.
PARTS: dict[str, str] = {
    "uncached": "of requests, not in the prefix cache (uncached)",
    "protected": "locked in the prefix cache (protected)",
    "used": "in use",
    "session_held": "held by sessions",
    "evictable": "in the prefix cache, evictable",
}
_ASKED = ("uncached", "protected", "session_held", "evictable")
# What happens at one time, with the sign that stands for it.
SIGNS = {"abort": "\u2715", "disconnect": "\u25cb", "retract": "\u25bc", "close": "\u25a1", "flush": "\u25c6"}
_DRAWN = ("workload", "drain", "probe")
# A line of the log is dated when it is read: so soon after the start, it may tell of what was before.
LOG_LAG = 0.1
# More would not be seen at this width, and every case of a long run has its drawing.
_MOST_SAMPLES, _MOST_MARKERS, _MOST_OPERATIONS = 300, 200, 400


@dataclass(frozen=True, slots=True)
class Area:
    """One part of a pool: ``path`` is an SVG path, ``peak`` and ``rest`` are in tokens.

    ``rest``: at the reading that was judged, when all was closed and before any flush; else at the last one.
    """

    part: str
    path: str
    peak: int
    rest: int


@dataclass(frozen=True, slots=True)
class Marker:
    """Something at one time: an abort, a retraction, a close, a flush."""

    x: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation in its lane."""

    x: float
    width: float
    y: float
    finish: str
    title: str


@dataclass(frozen=True, slots=True)
class PoolChart:
    """One pool over time; ``top`` is the number of tokens at the upper edge, ``ticks`` are (y, tokens)."""

    pool: str
    top: int
    total: int | None
    areas: list[Area]
    ticks: list[tuple[float, str]]


@dataclass(slots=True)
class Timeline:
    """All drawings of a case. ``ticks`` are (x, seconds); ``left_out`` counts operations without a bar.

    ``judged`` is the x at which the account was judged, None where the case did not get so far.
    """

    seconds: float
    judged: float | None = None
    pools: list[PoolChart] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    ticks: list[tuple[float, str]] = field(default_factory=list)
    left_out: int = 0


def _parts(gauge: PoolGauge) -> dict[str, int]:
    """What is not free, by part; an engine that tells only a sum has one part."""
    found = {name: getattr(gauge, name) for name in _ASKED}
    known = {name: value for name, value in found.items() if value is not None}
    if gauge.used is not None:
        divided = sum(value for name, value in known.items() if name != "evictable")
        known["used"] = max(gauge.used - divided, 0)
    return known


def _thinned(samples: Sequence[GaugeSample]) -> list[GaugeSample]:
    """At most ``_MOST_SAMPLES``, evenly spread, the last one among them."""
    step = -(-len(samples) // _MOST_SAMPLES)
    kept = list(samples[::step]) if step > 1 else list(samples)
    if kept and kept[-1] is not samples[-1]:
        kept.append(samples[-1])
    return kept


def _pool_chart(
    pool: str, samples: Sequence[GaugeSample], x: Callable[[float], float], judged: float
) -> PoolChart | None:
    told = [(sample, gauge) for sample in samples if (gauge := sample.pool(pool)) is not None]
    points = [(sample.t, gauge) for sample, gauge in told]
    rows = [(t, _parts(gauge)) for t, gauge in points]
    names = [name for name in PARTS if any(parts.get(name) for _, parts in rows)]
    if not rows:
        return None
    peak = max(max(sum(parts.values()) for _, parts in rows), 1)
    step = _round(peak / 4)
    top = math.ceil(peak / step) * step
    # What was judged is the fullest reading, and no line of the log; others may be dated behind it.
    full = [
        (sample.source != "log", len(parts), at) if judged < math.inf else (False, 0, at)
        for at, ((sample, _), (_, parts)) in enumerate(zip(told, rows, strict=True))
        if sample.t <= judged
    ]
    rest = max(full, default=(False, 0, 0))[2]
    floor = [0] * len(rows)
    areas = []
    for name in names:
        values = [parts.get(name, 0) for _, parts in rows]
        ceiling = [low + value for low, value in zip(floor, values, strict=True)]
        upper = _steps([t for t, _ in rows], ceiling, top, x)
        lower = _steps([t for t, _ in rows], floor, top, x)
        path = "M" + " L".join([*upper, *reversed(lower)]) + " Z"
        areas.append(Area(name, path, max(values), values[rest]))
        floor = ceiling
    ticks = [(HEIGHT * (1 - tokens / top), f"{tokens:,}") for tokens in range(0, top + 1, step)]
    total = next((gauge.total for _, gauge in points if gauge.total is not None), None)
    return PoolChart(pool, top, total, areas, ticks)


def _round(tokens: float) -> int:
    """The least of 1, 2, 5, 10, 20, ... that is not less."""
    power = int(10 ** int(math.log10(max(tokens, 1))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= tokens)


def _steps(times: Sequence[float], values: Sequence[int], top: int, x: Callable[[float], float]) -> list[str]:
    """A gauge keeps its value until the next reading, so it is drawn in steps."""
    points: list[str] = []
    before: float | None = None
    for t, value in zip(times, values, strict=True):
        y = HEIGHT * (1 - value / top)
        if before is not None:
            points.append(f"{x(t):.1f} {before:.1f}")
        points.append(f"{x(t):.1f} {y:.1f}")
        before = y
    return points


def _name(record: OpRecord) -> str:
    return record.op.label or f"{record.op.kind} {record.op.id}"


def _markers(
    records: Iterable[OpRecord], samples: Sequence[GaugeSample], x: Callable[[float], float], start: float
) -> list[Marker]:
    markers = [
        Marker(x(record.started), record.op.kind, f"{_name(record)} at {record.started - start:.2f} s")
        for record in records
        if record.op.kind in SIGNS and record.phase != "control"
    ]
    before: int | None = None
    for sample in samples:
        now = sample.retracted_total
        if now is not None:
            if before is not None and now > before:
                title = f"{now - before} retracted by {sample.t - start:.2f} s"
                markers.append(Marker(x(sample.t), "retract", title))
            before = now
    return sorted(markers, key=lambda marker: marker.x)[:_MOST_MARKERS]


def _is_last_flush(record: OpRecord) -> bool:
    return (record.phase, record.op.kind) == ("drain", "flush")


def _lane(record: OpRecord) -> str:
    if record.op.session:
        return record.op.session
    return "no session" if record.phase == "workload" else "probes"


def _tick_step(seconds: float) -> float:
    return next((step for step in (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300) if seconds / step <= 10), 600.0)


def timeline(lines: Iterable[Line], *, operations: bool) -> Timeline | None:
    """The drawings of a case from its trace's lines; None where there is nothing to draw.

    ``operations`` adds a lane for each session (and one for plain requests) with a bar for each request.
    """
    samples: list[GaugeSample] = []
    records: list[OpRecord] = []
    for line in lines:
        if isinstance(line, GaugeSample) and line.pools:
            samples.append(line)
        elif isinstance(line, OpRecord):
            records.append(line)
    workload = [record.started for record in records if record.phase == "workload"]
    if workload:  # the controls before it and the replays after it move no gauge that anyone asks about
        first = min(workload)
        records = [record for record in records if record.phase in _DRAWN and record.started >= first]
        flushed = min((r.ended for r in records if _is_last_flush(r)), default=math.inf)
        samples = [
            sample
            for sample in samples
            if first + (LOG_LAG if sample.source == "log" else 0) <= sample.t <= flushed
        ]
    times = [sample.t for sample in samples] + [t for record in records for t in (record.started, record.ended)]
    if not times:
        return None
    start, end = min(times), max(times)
    span = max(end - start, 0.001)

    def x(t: float) -> float:
        return (t - start) / span * WIDTH

    samples.sort(key=lambda sample: sample.t)
    # Probes and the flush come behind the verdict, and change what the server holds.
    behind = [record.started for record in records if record.phase == "probe" or _is_last_flush(record)]
    judged = min(behind, default=math.inf)
    result = Timeline(span, x(judged) if behind else None, markers=_markers(records, samples, x, start))
    kept = _thinned([s for s in samples if s.t <= judged]) + _thinned([s for s in samples if s.t > judged])
    pools = dict.fromkeys(gauge.pool for sample in samples for gauge in sample.pools)
    result.pools = [chart for pool in pools if (chart := _pool_chart(pool, kept, x, judged)) is not None]
    step = _tick_step(span)
    result.ticks = [(x(start + at * step), f"{at * step:g} s") for at in range(int(span / step) + 1)]
    if operations:
        requests = [record for record in records if record.op.generates]
        result.left_out = max(len(requests) - _MOST_OPERATIONS, 0)
        shown = requests[-_MOST_OPERATIONS:]  # the end of a case is where it failed
        result.lanes = list(dict.fromkeys(_lane(record) for record in shown))
        for record in shown:
            lane = result.lanes.index(_lane(record))
            left, right = x(record.started), x(record.ended)
            title = f"{_name(record)}: {record.reply.finish}, {len(record.reply.output_ids)} tokens, "
            title += f"{record.started - start:.2f} to {record.ended - start:.2f} s"
            width = max(right - left, 1.5)
            result.bars.append(Bar(left, width, lane * LANE, record.reply.finish, title))
    return result
