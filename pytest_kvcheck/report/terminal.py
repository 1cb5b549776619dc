"""The end of a run in a terminal: the table, a paragraph a fault, and what was and was not proven."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_kvcheck.findings import Outcome
from pytest_kvcheck.report.results import CaseResult
from pytest_kvcheck.report.summary import (
    WORDS,
    Entry,
    Seen,
    Summary,
    clean,
    duration,
    size_of,
    summarise,
)

_STYLES: dict[Outcome, str] = {
    "passed": "green",
    "skipped": "dim",
    "unexercised": "yellow",
    "inconclusive": "yellow",
}
_SYMBOLS: dict[Outcome, tuple[str, str]] = {
    "passed": ("\u2713", "."),
    "skipped": ("-", "-"),
    "unexercised": ("?", "?"),
    "inconclusive": ("?", "?"),
}
_BAD_SYMBOL = ("\u2717", "x")
# For tables that are wider than the terminal.
_SHORT = {"MISMATCH": "MISM", "RESIDUE": "RESID", "UNEXERCISED": "UNEX", "INCONCLUSIVE": "INCON"}
_MANY_CASES = 6
# A cell's name is broken over lines rather than below this many columns.
_LEAST_LABEL = 16


def _unicode_terminal() -> bool:
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
    return encoding.lower().replace("-", "").startswith("utf")


class _Page:
    """Lines of a given width, with or without colour."""

    def __init__(self, width: int, color: bool, unicode: bool) -> None:
        self.width, self.unicode = max(width, 40), unicode
        self.buffer = io.StringIO()
        self.console = Console(
            file=self.buffer,
            width=self.width,
            force_terminal=color,
            color_system="standard" if color else None,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
            force_jupyter=False,
            _environ={},
        )

    def line(self, text: str = "", style: str = "", indent: str = "") -> None:
        """One line of text behind an indent or bullet, wrapped at spaces; a path or command is never broken."""
        wrapped = textwrap.wrap(
            clean(text),
            self.width,
            initial_indent=indent,
            subsequent_indent=" " * max(len(indent), 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for part in wrapped or [""]:
            self.console.print(Text(part, style=style), soft_wrap=True)

    def items(self, items: Iterable[str]) -> None:
        """Short texts side by side, none of them broken."""
        line = ""
        for item in items:
            if line and len(line) + 2 + len(item) > self.width:
                self.line(line, "dim")
                line = ""
            line += ("  " if line else "") + item
        self.line(line, "dim")

    def text(self) -> str:
        lines = "\n".join(line.rstrip() for line in self.buffer.getvalue().splitlines())
        return lines if self.unicode else lines.encode("ascii", "backslashreplace").decode()


Form = Literal["words", "short", "letters"]


def _mark(entry: Entry, unicode: bool, form: Form) -> Text:
    result = entry.gravest
    word = WORDS[result.outcome]
    symbol = _SYMBOLS.get(result.outcome, _BAD_SYMBOL)[0 if unicode else 1]
    shown = f"{symbol} {word}" if form == "words" else symbol + _SHORT.get(word, word)
    if form == "letters":
        shown = symbol if word in ("ok", "skip") else symbol + word[0]
    style = "yellow" if result.expected else _STYLES.get(result.outcome, "bold red")
    known = "*" if result.expected else ""
    return Text(shown + known + (f" {entry.count}" if entry.count else ""), style=style)


def _table(summary: Summary, page: _Page, headers: Sequence[str], form: Form) -> Table:
    short = form != "words"
    lines = box.SIMPLE_HEAD if page.unicode else box.ASCII2
    table = Table(box=lines, pad_edge=False, padding=(0, 1, 0, 0) if short else (0, 1), show_edge=False)
    table.add_column("cell", overflow="fold")
    for header in headers:
        table.add_column(header, no_wrap=short)
    for row in summary.rows:
        entries = (row.entries.get(name) for name in summary.workloads)
        marks = [_mark(entry, page.unicode, form) if entry else Text("") for entry in entries]
        table.add_row(Text(clean(row.label)), *marks)
    return table


def _print_table(summary: Summary, page: _Page) -> None:
    """The widest form that fits: names as they are, names over several lines, or numbers with a legend; in
    those, words cut short, or single letters.
    """
    names = summary.workloads
    stacked = [name.replace("-", "-\n") for name in names]
    for headers in (names, stacked):
        table = _table(summary, page, headers, "words")
        if page.console.measure(table).maximum <= page.width and _unconstrained(table, page):
            page.console.print(table)
            return
    found = {WORDS[outcome] for outcome in summary.counts if outcome not in ("passed", "skipped")}
    numbers = [str(at) for at in range(1, len(names) + 1)]
    form: Form = "short"
    longest = max(len(row.label) for row in summary.rows)
    if page.width - _marks_width(summary, page, len(numbers)) < min(longest, _LEAST_LABEL):
        form = "letters"
    page.console.print(_table(summary, page, numbers, form))
    page.items(f"{at} {name}" for at, name in enumerate(names, start=1))
    cut = _SHORT if form == "short" else {word: word[0] for word in WORDS.values()}
    if legend := [f"{short} {word.lower()}" for word, short in cut.items() if word in found]:
        page.items(legend)


def _marks_width(summary: Summary, page: _Page, columns: int) -> int:
    """Columns of the terminal that the short marks take, each set off by two."""
    widest = [
        max(len(_mark(row.entries[name], page.unicode, "short")) for row in summary.rows if name in row.entries)
        for name in summary.workloads
    ]
    return sum(widest) + 2 * columns


def _unconstrained(table: Table, page: _Page) -> bool:
    wide = page.console.options.update(width=10_000, max_width=10_000)
    return page.console.measure(table, options=wide).maximum <= page.width


def _print_fault(fault: Seen, page: _Page, told: bool) -> None:
    head, *rest = fault.finding.paragraph().splitlines()
    page.line(head, "bold")
    for line in rest if len(fault.cases) > 1 or not told else ():
        page.line(line.strip(), indent="  ")
    (result, _), *others = fault.cases
    page.line(f"In: {result.id}" + (f" (seed {result.seed})" if result.seed else ""), indent="  ")
    for name, place in (("Trace", result.trace), ("Repro", result.repro)):
        if place:
            page.line(f"{name}: {place}", indent="  ")
    if others:
        shown = [
            other.id.partition("::")[2] + (f" ({amount})" if (amount := size_of(finding)) else "")
            for other, finding in others[:_MANY_CASES]
        ]
        more = f" and {len(others) - _MANY_CASES} more" if len(others) > _MANY_CASES else ""
        page.line(f"Also in: {', '.join(shown)}{more}", indent="  ")
    for known in result.known:
        if known.covers(fault.finding):
            page.line(f"Known until {known.until}: see {known.page}", indent="  ")
    page.line()


def _print_errors(results: Iterable[CaseResult], page: _Page, told: bool) -> None:
    errors = [result for result in results if result.outcome == "error"]
    if told and errors:
        more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
        page.line(f"ERROR {errors[0].id}{more}: told above", "bold")
        page.line()
        return
    for result in errors:
        page.line(f"ERROR {result.id}", "bold")
        for line in result.reason.splitlines() or ["no reason was given"]:
            page.line(line, indent="  ")
        page.line()


def _print_summary(summary: Summary, results: Sequence[CaseResult], page: _Page) -> None:
    total = sum(summary.counts.values())
    counts = [
        f"{count} {outcome if outcome in ('passed', 'skipped') else WORDS[outcome]}"
        for outcome, count in summary.counts.items()
    ]
    known = f" ({summary.known} of them known, *)" if summary.known else ""
    seconds = duration(sum(result.duration_s for result in results))
    line = f"{total} case{'s' if total != 1 else ''}: {', '.join(counts) or 'none ran'}{known}"
    if summary.strays:
        line += f", and {len(summary.strays)} file{'s' if len(summary.strays) != 1 else ''} without results"
    line += f"; {seconds} in cases"
    clean_run = set(summary.counts) <= {"passed", "skipped"} and "passed" in summary.counts
    clean_run = clean_run and not summary.strays
    page.line(line, "bold green" if clean_run else "bold red")
    passed = summary.counts.get("passed", 0)
    if passed and summary.proven:
        page.line(f"Proven for the {passed} that passed:")
        for what in summary.proven:
            page.line(what, indent="  - ")
    elif passed:
        page.line(f"The {passed} that passed do not say what was judged.")
    if summary.unproven:
        page.line("Not proven:")
        for reason in summary.unproven:
            page.line(reason, indent="  - ")
    if summary.differs:
        page.line("Where a server differs from its cell's words:")
        for text in summary.differs:
            page.line(text, indent="  - ")
    floors = [result.noise_floor for result in results if result.noise_floor is not None]
    if floors:
        page.line(f"Log-prob noise of the controls: at most {max(floors):.2g} nats.")


def render(
    results: Sequence[CaseResult],
    width: int = 80,
    color: bool = False,
    unicode: bool | None = None,
    told: bool = False,
) -> str:
    """The final table, a paragraph for each fault, and the summary, as text of at most ``width`` columns.

    Only what must not be broken (paths, commands, ids) may be wider. ``unicode`` None asks the terminal;
    False gives ASCII. ``told``: each failed case stands in full above, so what would repeat it is left out.
    """
    page = _Page(width, color, _unicode_terminal() if unicode is None else unicode)
    summary = summarise(results)
    if summary.rows:
        _print_table(summary, page)
        page.line()
    for fault in summary.faults:
        _print_fault(fault, page, told)
    _print_errors(results, page, told)
    _print_summary(summary, results, page)
    return page.text()
