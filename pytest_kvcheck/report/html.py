"""The HTML report: one file that needs nothing else, made from results and the traces beside them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from pytest_kvcheck.report import charts
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.report.summary import WORDS, clean, duration, engine_of, size_of, summarise
from pytest_kvcheck.trace import Line, read_trace

_CALM = ("passed", "skipped")


@dataclass(frozen=True, slots=True)
class _Case:
    """A case in the report: ``anchor`` is its place in the page, ``problem`` why it has no drawing."""

    result: CaseResult
    anchor: str
    timeline: charts.Timeline | None
    problem: str
    links: dict[str, str]


def _shown(value: object) -> object:
    """A value as the page shows it: text from a server without control characters."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _found(place: str, artifacts: Path) -> Path | None:
    """A path of a result: as it stands, or below an artifacts folder that was moved here."""
    if not place:
        return None
    path = Path(place)
    parts = path.parts
    # The end of the path is what a moved folder keeps: CASE/trace.jsonl, then deeper ones.
    below = [artifacts.joinpath(*parts[-depth:]) for depth in range(2, min(len(parts), 5) + 1)]
    return next((each for each in (path, artifacts / place, *below) if each.is_file()), None)


def _lines(trace: Path) -> list[Line]:
    lines = list(read_trace(trace))
    gauges = trace.with_name("gauges.jsonl")
    return lines + list(read_trace(gauges)) if gauges.is_file() else lines


def _case(result: CaseResult, number: int, artifacts: Path, base: Path) -> _Case:
    drawing, problem = None, ""
    trace = _found(result.trace, artifacts)
    if trace is not None:
        try:
            drawing = charts.timeline(_lines(trace), operations=result.outcome not in _CALM)
        except (OSError, ValueError) as error:
            problem = f"no timeline: {error}"
    elif result.trace:
        problem = f"no timeline: no trace at {result.trace}"
    links = {
        name: quote(os.path.relpath(path, base))
        for name, place in (("trace", result.trace), ("repro", result.repro), ("log", result.log))
        if (path := _found(place, artifacts)) is not None
    }
    return _Case(result, f"case-{number}", drawing, problem, links)


def render_html(results: Sequence[CaseResult], artifacts: Path, base: Path) -> str:
    """The report as one HTML document. ``artifacts`` holds the traces; links are relative to ``base``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["ident"] = id
    cases = [_case(result, number, artifacts, base) for number, result in enumerate(results, start=1)]
    return environment.get_template("report.html.j2").render(
        summary=summarise(results),
        cases=cases,
        anchors={id(case.result): case.anchor for case in cases},
        links={id(case.result): case.links for case in cases},
        words=WORDS,
        calm=_CALM,
        charts=charts,
        size_of=size_of,
        duration=duration,
        engine_of=engine_of,
        seconds=sum(result.duration_s for result in results),
    )


def write_html(path: Path, results: Sequence[CaseResult], artifacts: Path) -> None:
    """Write the report of results whose traces stand below ``artifacts``.

    A trace that is missing or damaged costs its drawing, nothing else. Raises ``OSError`` where the file
    cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render_html(results, artifacts, path.parent.resolve())
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(page.encode("utf-8", "backslashreplace"))
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
