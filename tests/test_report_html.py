"""The HTML report: self-contained, escaped, with a drawing for a case whose trace is there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcheck.findings import SEVERITY
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.report.charts import HEIGHT, SIGNS, WIDTH, timeline
from pytest_kvcheck.report.html import write_html
from pytest_kvcheck.report.results import CaseResult, write_result
from pytest_kvcheck.trace import (
    GaugeSample,
    Line,
    OpRecord,
    PoolGauge,
    TraceHeader,
    TraceWriter,
    read_trace,
)
from tests.report_helpers import leak, result, write_trace

VOID = {"meta", "br", "hr", "link", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path, results: list[CaseResult]) -> tuple[str, Page]:
    path = folder / "out" / "report.html"
    write_html(path, results, folder / "art")
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_a_failed_case_shows_its_finding_and_drawing(tmp_path: Path) -> None:
    trace = tmp_path / "art" / "page-256" / "stress" / "trace.jsonl"
    write_trace(trace)
    failed = result("page-256", "stress", "leak", findings=[leak()], trace=str(trace), noise_floor=0.01)
    text, page = page_of(tmp_path, [failed, result("baseline", "stress")])
    assert "it has 256." in page.text
    assert "session s3, round 2 turn 3 (aborted)" in page.text
    assert "total 32768 = available 32256 + evictable 256 + uncached 256" in page.text
    assert "at rest, before any flush" not in page.text, "this trace ends without probe and flush"
    assert "since the workload began" in page.text
    assert text.count(">tokens</text>") == 1
    paths = [attributes["class"] for tag, attributes in page.tags if tag == "path"]
    assert paths == ["uncached", "protected", "session_held", "evictable"]
    markers = [attributes["class"] for tag, attributes in page.tags if tag == "g"]
    assert markers == ["marker retract", "marker abort", *["marker close"] * 4]
    bars = [str(attributes["class"]).split()[-1] for tag, attributes in page.tags if tag == "rect"]
    assert sorted(bars) == ["abort"] + ["length"] * 11
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a" and attributes.get("href")]
    assert "../art/page-256/stress/trace.jsonl" in links
    opened = [attributes["id"] for tag, attributes in page.tags if tag == "details" and "open" in attributes]
    assert opened == ["case-1"]


def test_the_file_needs_nothing_from_a_network(tmp_path: Path) -> None:
    text, page = page_of(tmp_path, [result("a", "w")])
    assert not re.search(r"https?:|//cdn|@import|url\(", text)
    assert not [tag for tag, attributes in page.tags if tag == "link" or attributes.get("src")]


def test_text_from_a_server_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=y>\" ' \udcff"
    finding = leak(headline=evil, owner=evil, evidence=(evil,), next_step=evil)
    _, page = page_of(
        tmp_path,
        [
            result(evil, evil, "leak", findings=[finding], reason=evil, argv=[evil], command=evil),
            CaseResult.failed_to_run(evil, evil),
        ],
    )
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]


def test_a_moved_folder_keeps_its_drawings_and_a_damaged_trace_costs_only_its_own(tmp_path: Path) -> None:
    good, bad = tmp_path / "art" / "x" / "w" / "trace.jsonl", tmp_path / "art" / "y" / "w" / "trace.jsonl"
    write_trace(good, leaking=False)
    bad.parent.mkdir(parents=True)
    bad.write_text('garbage\n{"record": "note", "t": 1, "what": "x"}\n')
    _, page = page_of(
        tmp_path,
        [
            result("x", "w", trace="/elsewhere/.kvcheck/x/w/trace.jsonl"),
            result("y", "w", trace=str(bad)),
            result("z", "w", trace="gone/trace.jsonl"),
        ],
    )
    assert sum(tag == "svg" for tag, _ in page.tags) == 1
    assert "no timeline: " in page.text
    assert "expected a kvcheck trace line" in page.text
    assert "no timeline: no trace at gone/trace.jsonl" in page.text


def test_gauges_in_a_file_of_their_own_are_drawn(tmp_path: Path) -> None:
    trace = tmp_path / "art" / "x" / "w" / "trace.jsonl"
    write_trace(trace)
    lines = trace.read_text().splitlines(keepends=True)
    trace.with_name("gauges.jsonl").write_text("".join(line for line in lines if '"gauges"' in line))
    trace.write_text("".join(line for line in lines if '"gauges"' not in line))
    _, page = page_of(tmp_path, [result("x", "w", trace=str(trace))])
    assert sum(tag == "path" for tag, _ in page.tags) == 4


@pytest.mark.parametrize("outcome", [*SEVERITY, "passed", "skipped", "error"])
def test_every_outcome_has_a_page(outcome: str, tmp_path: Path) -> None:
    _, page = page_of(tmp_path, [result("a", "w", outcome)])  # type: ignore[arg-type]
    assert page.text


def test_no_results_and_stray_results(tmp_path: Path) -> None:
    page_of(tmp_path, [])
    _, page = page_of(tmp_path, [CaseResult.failed_to_run("x/result.json", "damaged")])
    assert "damaged" in page.text


def test_results_read_from_files_make_the_report(tmp_path: Path) -> None:
    from pytest_kvcheck.report.results import read_results

    write_result(tmp_path / "art" / "a", result("a", "w"))
    write_result(tmp_path / "art" / "b", result("b", "w", "stuck", reason="turn 3 did not end"))
    _, page = page_of(tmp_path, read_results(tmp_path / "art"))
    assert "turn 3 did not end" in page.text


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", path)]


def test_a_drawing_stays_inside_its_box_and_is_thinned(tmp_path: Path) -> None:
    lines: list[Line] = [
        GaugeSample(t=100 + t / 10, source="x", pools=[PoolGauge(total=1000, used=t % 700)])
        for t in range(10_000)
    ]
    drawing = timeline(lines, operations=True)
    assert drawing is not None
    (pool,) = drawing.pools
    (area,) = pool.areas
    assert (area.part, area.rest) == ("used", 9_999 % 700)
    assert (pool.top, pool.ticks[-1]) == (800, (0.0, "800"))
    xs, ys = numbers(area.path)[::2], numbers(area.path)[1::2]
    assert min(xs) == 0.0
    assert max(xs) == WIDTH
    assert min(ys) > 0.0
    assert max(ys) == HEIGHT
    assert len(area.path) < 40_000


def test_an_empty_or_idle_trace_draws_nothing_or_a_flat_line(tmp_path: Path) -> None:
    assert timeline([], operations=True) is None
    flat = timeline([GaugeSample(t=1.0, source="x", pools=[PoolGauge(used=0)])], operations=True)
    assert flat is not None
    assert flat.pools[0].areas == []
    write_trace(tmp_path / "t.jsonl")
    full = timeline(read_trace(tmp_path / "t.jsonl"), operations=False)
    assert full is not None
    assert full.bars == []


def test_the_drawing_begins_with_the_workload_and_mixes_sources(tmp_path: Path) -> None:
    control = OpRecord(op=Operation(id=1, kind="generate"), phase="control", started=0, ended=9)
    turn = OpRecord(op=Operation(id=2, kind="turn", session="s0"), started=10, ended=12)
    loads = GaugeSample(t=11, source="loads", pools=[PoolGauge(used=40)])
    account = GaugeSample(t=13, source="log", pools=[PoolGauge(used=0, evictable=8, session_held=0)])
    drawing = timeline([control, turn, loads, account], operations=True)
    assert drawing is not None
    assert drawing.seconds == 3
    assert drawing.lanes == ["s0"]
    assert [(area.part, area.peak, area.rest) for area in drawing.pools[0].areas] == [
        ("used", 40, 0),
        ("evictable", 8, 8),
    ]
    assert drawing.judged is None


def test_the_legend_says_what_was_held_before_the_flush(tmp_path: Path) -> None:
    def reading(t: float, used: int, evictable: int) -> GaugeSample:
        return GaugeSample(t=t, source="x", pools=[PoolGauge(used=used, evictable=evictable, session_held=0)])

    def did(number: int, kind: Any, at: float, phase: Any = "workload") -> OpRecord:
        op = Operation(id=number, kind=kind, session="s" if kind in ("turn", "close") else None)
        return OpRecord(op=op, phase=phase, started=at, ended=at + 1)

    lines: list[Line] = [
        did(1, "turn", 10),
        *(reading(10 + step / 500, 900, 0) for step in range(600)),
        did(2, "close", 12, "drain"),
        *(reading(13 + step / 500, 70, 30) for step in range(601)),
        GaugeSample(t=10.05, source="log", pools=[PoolGauge(used=5000)]),
        GaugeSample(t=14.5, source="log", pools=[PoolGauge(used=71)]),
        did(3, "generate", 15, "probe"),
        reading(15.5, 80, 40),
        did(4, "flush", 16, "drain"),
        reading(16.9, 0, 0),
        did(5, "score", 18, "replay"),
        reading(18, 500, 0),
    ]
    drawing = timeline(lines, operations=True)
    assert drawing is not None
    rest = {area.part: (area.peak, area.rest) for area in drawing.pools[0].areas}
    assert rest == {"used": (900, 70), "evictable": (40, 30)}
    assert drawing.judged == pytest.approx(WIDTH * 5 / 7)
    assert drawing.seconds == 7, "the replay behind the flush is not drawn"
    assert drawing.lanes == ["s", "probes"]
    assert {marker.kind for marker in drawing.markers} == {"close", "flush"}
    assert len({SIGNS[marker.kind] for marker in drawing.markers}) == 2
    assert [marker.title for marker in drawing.markers] == ["close 2 at 2.00 s", "flush 4 at 6.00 s"]


def test_nothing_proven_reads_as_sentences(tmp_path: Path) -> None:
    lost = result("a", "w", "leak", findings=[leak(owner=None)], lacks={"busy_check": "off"}, command="again x")
    _, page = page_of(tmp_path, [lost])
    for words in ("No case passed, so nothing is proven.", "Not judged in this run:", "not known", "again x"):
        assert words in page.text
    assert "busy_check on reference 0.1.0: off (1 of 1 case)" in page.text


def test_a_pool_that_was_always_free_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "art" / "x" / "w" / "trace.jsonl"
    with TraceWriter(trace, TraceHeader()) as writer:
        writer.write(GaugeSample(t=1.0, source="x", pools=[PoolGauge(total=8, used=0)]))
    _, page = page_of(tmp_path, [result("x", "w", trace=str(trace))])
    assert "free in every reading" in page.text
    assert not [tag for tag, _ in page.tags if tag == "svg"]
