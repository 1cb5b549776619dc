"""What results come to: the table, the findings without repetition, and what was and was not proven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pytest_kvcheck.findings import Finding, Outcome, some
from pytest_kvcheck.report.results import GRAVITY, CaseResult

# What a passed case shows, by the oracle that showed it.
PROVES = {
    "conservation": "every KV slot came back, per pool, before any flush",
    "session_arithmetic": "cached and prompt token counts are exact",
    "protocol": "every reply kept to the protocol",
    "logprobs": "log-probs do not depend on caching, chunking, retraction, speculation or aborts",
    "self_test": "the log-prob comparison saw one token that was wrong on purpose",
    "scorer": "log-probs are those of another implementation on the same weights",
    "soak": "equal batches leave equal memory",
    "rows": "as many requests can run side by side as before",
    "liveness": "every operation ended in time and a fresh request completes",
    "engine_log": "the engine's log holds no fatal line",
    "residue": "no process, port, descriptor or GPU memory stays",
    "exercise": "each case did what its name says",
}
MANY_CELLS = 4
WORDS: dict[Outcome, str] = {
    "passed": "ok",
    "skipped": "skip",
    "leak": "LEAK",
    "mismatch": "MISMATCH",
    "stuck": "STUCK",
    "crash": "CRASH",
    "residue": "RESIDUE",
    "unexercised": "UNEXERCISED",
    "inconclusive": "INCONCLUSIVE",
    "error": "ERROR",
}


def clean(text: str) -> str:
    """Text from a server, safe to show: control characters and broken Unicode shown as escapes."""
    shown = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    return shown.encode("utf-8", "backslashreplace").decode()


def size_of(finding: Finding) -> str:
    """``256 tokens, 1 page``; "" where the amount is not known."""
    pages = None if finding.pages == finding.tokens else finding.pages  # of one token each
    sizes = ((finding.tokens, "token"), (pages, "page"))
    return ", ".join(some(size, unit) for size, unit in sizes if size is not None)


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of the table: the repeats of one case, judged by the gravest."""

    results: tuple[CaseResult, ...]

    @property
    def gravest(self) -> CaseResult:
        return min(self.results, key=lambda result: GRAVITY.index(result.outcome))

    @property
    def count(self) -> str:
        """``2/3`` where two of three repeats had the gravest outcome; "" where all had it."""
        same = sum(result.outcome == self.gravest.outcome for result in self.results)
        return "" if same == len(self.results) else f"{same}/{len(self.results)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell (of one matrix, on one engine) with an entry for each workload that ran on it."""

    label: str
    entries: dict[str, Entry]


@dataclass(slots=True)
class Seen:
    """One fault: its finding as first seen, and each case that showed it."""

    finding: Finding
    cases: list[tuple[CaseResult, Finding]] = field(default_factory=list)


@dataclass(slots=True)
class Summary:
    """Everything that the terminal and the HTML report say of a run."""

    rows: list[Row]
    workloads: list[str]
    strays: list[CaseResult]
    counts: dict[Outcome, int]
    known: int
    faults: list[Seen]
    proven: list[str]
    unproven: list[str]
    differs: list[str]
    engines: list[str]


def _matrix(result: CaseResult) -> str:
    return result.id.partition("::")[0]


def named(engine: str, version: str) -> str:
    """An engine with its version, as far as they are known: ``sglang 0.5.23``, ``reference 0.1.0``."""
    return f"{engine} {version.removeprefix(f'{engine}-')}".strip()


def engine_of(result: CaseResult) -> str:
    """The engine of a result with its version, as far as they are known."""
    return named(result.engine, result.engine_version)


def duration(seconds: float) -> str:
    """``0.4 s``, ``38 s``, ``2 min 5 s``, ``1 h 2 min``."""
    whole = round(seconds)
    if 0 < seconds < 1:
        return f"{seconds:.1g} s"
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _place(result: CaseResult) -> tuple[str, str]:
    return _matrix(result), result.cell


def _row_of(result: CaseResult, cases: Sequence[CaseResult]) -> tuple[str, str, str, str]:
    """Cell, matrix, engine and version. A case that was skipped or failed before the engine or its version was
    known belongs to the only engine and version that its cell has, if there is one.
    """
    engine, version = result.engine, result.engine_version
    if not version:
        same = {
            (other.engine, other.engine_version)
            for other in cases
            if _place(other) == _place(result) and other.engine_version and engine in ("", other.engine)
        }
        if len(same) == 1:
            engine, version = same.pop()
    return (result.cell, _matrix(result), engine, version)


def _rows(cases: Sequence[CaseResult]) -> list[Row]:
    groups: dict[tuple[str, str, str, str], dict[str, list[CaseResult]]] = {}
    for result in cases:
        entries = groups.setdefault(_row_of(result, cases), {})
        entries.setdefault(result.workload.partition("#")[0], []).append(result)
    twice = Counter(cell for cell, *_ in groups)
    rows = []
    for (cell, matrix, engine, version), entries in groups.items():
        others = [key for key in groups if key[0] == cell]
        told = [
            part
            for at, part in ((1, matrix), (2, engine), (3, version))
            if part and len({key[at] for key in others}) > 1
        ]
        label = f"{cell} ({' '.join(told)})" if twice[cell] > 1 and told else cell
        rows.append(Row(label, {name: Entry(tuple(found)) for name, found in entries.items()}))
    return rows


def _faults(cases: Iterable[CaseResult]) -> list[Seen]:
    """Findings of one identity on one engine are one fault: it is told once, with every case that shows it."""
    seen: dict[tuple[str, ...], Seen] = {}
    for result in cases:
        for finding in result.findings:
            key = (*(str(part) for part in finding.identity), result.engine)
            seen.setdefault(key, Seen(finding)).cases.append((result, finding))
    return sorted(seen.values(), key=lambda fault: GRAVITY.index(fault.finding.status))


def _of(count: int, total: int) -> str:
    return f"{count} of {some(total, 'case')}"


def _proven(passed: Sequence[CaseResult]) -> list[str]:
    judged = Counter(name for result in passed for name in set(result.judged))
    names = [*(name for name in PROVES if name in judged), *sorted(set(judged) - set(PROVES))]
    return [
        PROVES.get(name, name)
        + ("" if judged[name] == len(passed) else f" (in {judged[name]} of {len(passed)})")
        for name in names
    ]


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _unproven(cases: Sequence[CaseResult]) -> list[str]:
    total = len(cases)
    lacks: Counter[tuple[str, str, str]] = Counter()
    for result in cases:
        if result.outcome != "skipped":
            lacks.update((engine_of(result), why, name) for name, why in result.lacks.items())
    together: dict[tuple[str, str, int], list[str]] = {}
    for (engine, why, name), count in lacks.items():
        together.setdefault((engine, why, count), []).append(name)
    lines = [
        ", ".join(names) + (f" on {engine}" if engine else "") + f": {why} ({_of(count, total)})"
        for (engine, why, count), names in together.items()
    ]
    for outcome, words in (
        ("skipped", "skipped"),
        ("unexercised", "ran without doing what they are for"),
        ("inconclusive", "could not be judged"),
    ):
        reasons = Counter(result.reason for result in cases if result.outcome == outcome)
        for reason, count in reasons.items():
            lines.append(f"{_of(count, total)} {words}" + (f": {_first_line(reason)}" if reason else ""))
    if failed := sum(result.outcome == "error" for result in cases):
        lines.append(f"{_of(failed, total)} failed to run")
    return lines


def _differs(cases: Iterable[CaseResult]) -> list[str]:
    """Each way in which a server differs from its cell's words, once, with the cells that it holds for."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for result in cases:
        for note in result.notes:
            where.setdefault((engine_of(result), note), {})[result.cell] = None
    lines = []
    for (engine, note), cells in where.items():
        more = f" and {len(cells) - MANY_CELLS} more" if len(cells) > MANY_CELLS else ""
        lines.append(f"{engine}: {note} ({', '.join(list(cells)[:MANY_CELLS])}{more})")
    return lines


def summarise(results: Sequence[CaseResult]) -> Summary:
    """Sum up results, in their order. A result without a cell (a damaged file) is a stray, not a row."""
    cases = [result for result in results if result.cell and result.workload]
    strays = [result for result in results if not (result.cell and result.workload)]
    counts = Counter(result.outcome for result in cases)
    passed = [result for result in cases if result.outcome == "passed"]
    return Summary(
        rows=_rows(cases),
        workloads=list(dict.fromkeys(result.workload.partition("#")[0] for result in cases)),
        strays=strays,
        counts={outcome: counts[outcome] for outcome in ("passed", *GRAVITY) if counts[outcome]},
        known=sum(result.expected for result in results),
        faults=_faults(results),
        proven=_proven(passed),
        unproven=_unproven(cases) + [f"{stray.id} gave no results" for stray in strays],
        differs=_differs(cases),
        engines=list(dict.fromkeys(engine_of(result) for result in cases if result.engine)),
    )
