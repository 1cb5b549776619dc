"""The end of a run in a terminal: in 80 columns, without colour, without Unicode, and with hostile text."""

from __future__ import annotations

import re

import pytest

from pytest_kvcheck.report.results import CaseResult, KnownRef
from pytest_kvcheck.report.summary import duration, summarise
from pytest_kvcheck.report.terminal import render
from tests.report_helpers import leak, result

WORKLOADS = [
    *("kv-inheritance", "logprob-concurrent", "stress-concurrent", "nth-mid-abort", "first-mid-abort"),
    *("pre-abort", "abort-leak-repro"),
]
LONG = "eagle-v2-no-overlap-page-256-retract"


def grid() -> list[CaseResult]:
    return [result(cell, name) for cell in ("baseline", LONG) for name in WORKLOADS]


def test_a_small_clean_run() -> None:
    results = [result("baseline", "pre-abort"), result("page-16", "pre-abort")]
    assert render(results, 80, unicode=False) == (
        "cell     | pre-abort\n"
        "---------+----------\n"
        "baseline | . ok\n"
        "page-16  | . ok\n"
        "\n"
        "2 cases: 2 passed; 3 s in cases\n"
        "Proven for the 2 that passed:\n"
        "  - every KV slot came back, per pool, before any flush\n"
        "  - cached and prompt token counts are exact\n"
        "  - log-probs do not depend on caching, chunking, retraction, speculation or\n"
        "    aborts\n"
        "  - every operation ended in time and a fresh request completes\n"
        "  - the engine's log holds no fatal line\n"
        "  - no process, port, descriptor or GPU memory stays\n"
        "  - each case did what its name says"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.42, "0.4 s"), (1.5, "2 s"), (119, "119 s"), (125, "2 min 5 s"), (3725, "1 h 2 min")],
)
def test_durations_have_units_that_a_person_reads(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_what_stands_above_is_not_told_again() -> None:
    broken = [result("a", name, "error", reason="expected a port\nmore") for name in ("x", "y")]
    one = result("b", "x", "leak", findings=[leak()])
    text = render([*broken, one], 80, unicode=False, told=True)
    assert "expected a port" not in text
    assert "ERROR matrices/llama.yaml::a::x and 1 more: told above\n" in text
    assert "\n\n\n" not in text
    assert "  - 2 of 3 cases failed to run" in text
    assert "LEAK K07 [conservation] after every session was closed" in text
    assert "Owner:" not in text
    both = render([one, result("b", "y", "leak", findings=[leak()])], 80, unicode=False, told=True)
    assert both.count("Owner: session s3") == 1, "one fault of several cases is told once more, for all of them"
    alone = render(broken, 80, unicode=False)
    assert alone.count("expected a port") == 2, "where nothing stands above, it is told here"


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_every_width_holds_every_case(width: int, unicode: bool) -> None:
    results = grid()
    results[2] = result("baseline", WORKLOADS[2], "inconclusive", reason="the loop lagged")
    results[9] = result(LONG, WORKLOADS[2], "mismatch", findings=[leak(status="mismatch")])
    text = render(results, width, unicode=unicode)
    table = text[: text.index("LEAK" if "LEAK K" in text else "MISMATCH K")]
    assert all(len(line) <= width for line in table.splitlines())
    assert len(re.findall(r"\bok\b", table)) == 12
    assert re.search(r"INCON", table)
    assert re.search(r"MISM", table)
    for name in WORKLOADS:
        assert name in table.replace("-\n", "-") or width == 132, "a header or the legend names every workload"


def test_a_narrow_terminal_keeps_the_names_of_cells_readable() -> None:
    results = [result("baseline", f"w-{at}", "error", reason="x") for at in range(10)]
    results[3] = result("baseline", "w-3", "skipped", reason="x")
    text = render(results, 60, unicode=False)
    assert re.search(r"^baseline[ |]+xE[ |]+xE[ |]+xE[ |]+-[ |]+xE", text, re.MULTILINE), text
    assert "E error" in text
    wide = render(results, 132, unicode=False)
    assert re.search(r"^baseline .*x ERROR", wide, re.MULTILINE), wide


def test_ascii_has_only_ascii_and_no_colour_means_no_escapes() -> None:
    results = [result("a", "w", "leak", findings=[leak(headline="\u00e9t\u00e9 \x1b[31mred\x07 [bold]x[/]")])]
    plain = render(results, 80, unicode=False)
    assert plain.isascii()
    assert "\x1b" not in plain
    assert r"\x1b[31mred\x07 [bold]x[/]" in plain
    assert "\x1b[" in render(results, 80, color=True, unicode=True)
    assert "\x1b[31m" + "red" not in render(results, 80, color=True, unicode=True)


def test_broken_unicode_from_a_server_can_be_encoded() -> None:
    text = render([result("a", "w", "leak", findings=[leak(headline="bad \udcff byte")])], 80, unicode=True)
    assert text.encode()


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        *(
            ("passed", "ok"),
            ("skipped", "skip"),
            ("leak", "LEAK"),
            ("mismatch", "MISMATCH"),
            ("stuck", "STUCK"),
        ),
        *(("crash", "CRASH"), ("residue", "RESIDUE"), ("unexercised", "UNEXERCISED")),
        *(("inconclusive", "INCONCLUSIVE"), ("error", "ERROR")),
    ],
)
def test_every_outcome_has_its_word(outcome: str, word: str) -> None:
    text = render([result("a", "w", outcome)], 80, unicode=False)  # type: ignore[arg-type]
    assert re.search(rf"^a +\| [.x?-] {word}$", text, flags=re.MULTILINE)


def test_one_fault_in_many_cases_is_told_once_with_all_of_them() -> None:
    results = [
        result("a", f"w{at}", "leak", findings=[leak(tokens=at * 10, pages=None)]) for at in range(1, 10)
    ]
    text = render(results, 200, unicode=False)
    assert text.count("LEAK K07 [conservation]") == 1
    assert "Also in: a::w2 (20 tokens), " in text
    assert "and 2 more" in text
    assert "9 cases: 9 LEAK" in text


def test_different_pools_and_kinds_are_different_faults() -> None:
    findings = [leak(), leak(pool="swa"), leak(kind="K08")]
    assert len(summarise([result("a", "w", "leak", findings=findings)]).faults) == 3


def test_where_servers_differ_from_their_cells_is_said_once() -> None:
    small, mixed = "page_size 1 runs as blocks of 32 tokens", "mixed_chunk: false has no effect"
    results = [
        *(result("a", name, engine="vllm", engine_version="0.32.0", notes=[small, mixed]) for name in "xy"),
        *(result(cell, "x", engine="vllm", engine_version="0.32.0", notes=[small]) for cell in "bcdef"),
    ]
    text = render(results, 200, unicode=False)
    assert text.count(small) == text.count(mixed) == 1
    assert f"  - vllm 0.32.0: {small} (a, b, c, d and 2 more)" in text
    assert f"  - vllm 0.32.0: {mixed} (a)" in text
    assert "differs" not in render([result("a", "x")], 200, unicode=False)


def test_what_was_not_proven_is_said() -> None:
    results = [
        result("a", "x", judged=["conservation"], lacks={"page-level account": "0.5.12 has none"}),
        result("a", "y"),
        result("b", "x", "skipped", reason="a CPU cannot overlap speculation"),
        result("b", "y", "unexercised", reason="no retraction was seen"),
    ]
    text = render(results, 200, unicode=False)
    assert "  - every KV slot came back, per pool, before any flush\n" in text
    assert "cached and prompt token counts are exact (in 1 of 2)" in text
    assert "  - page-level account on reference 0.1.0: 0.5.12 has none (1 of 4 cases)" in text
    assert "  - 1 of 4 cases skipped: a CPU cannot overlap speculation" in text
    assert "  - 1 of 4 cases ran without doing what they are for: no retraction was seen" in text


def test_known_findings_are_marked() -> None:
    known = [KnownRef(kind="K07", page="docs/findings/x.md", until="2999-01-01")]
    text = render([result("a", "w", "leak", findings=[leak()], known=known)], 100, unicode=False)
    assert "x LEAK*" in text
    assert "Known until 2999-01-01: see docs/findings/x.md" in text
    assert "1 LEAK (1 of them known, *)" in text


def test_repeats_share_a_field_and_the_gravest_speaks() -> None:
    results = [
        result("a", "w"),
        result("a", "w#2", "leak", findings=[leak()], id="m.yaml::a::w#2"),
        result("a", "w#3", id="m.yaml::a::w#3"),
    ]
    results[0].id = "m.yaml::a::w"
    assert "x LEAK 1/3" in render(results, 80, unicode=False)


def test_engines_and_matrices_are_told_apart() -> None:
    results = [
        result("a", "w"),
        result("a", "w", engine="sglang", engine_version="0.5.23"),
        result("b", "w", id="x.yaml::b::w"),
        result("b", "w", id="y.yaml::b::w"),
    ]
    labels = [row.label for row in summarise(results).rows]
    assert labels == ["a (reference 0.1.0)", "a (sglang 0.5.23)", "b (x.yaml)", "b (y.yaml)"]


def test_a_case_that_failed_to_run_stands_in_the_row_of_its_cell() -> None:
    lost = CaseResult.failed_to_run("matrices/llama.yaml::a::x", "worker crashed\nTraceback")
    stray = CaseResult.failed_to_run("out/result.json", "damaged")
    summary = summarise([lost, result("a", "w"), stray])
    assert [row.label for row in summary.rows] == ["a"]
    assert summary.strays == [stray]
    text = render([lost, result("a", "w"), stray], 80, unicode=False)
    assert "ERROR matrices/llama.yaml::a::x\n  worker crashed\n  Traceback" in text
    assert "ERROR out/result.json\n  damaged" in text
    assert "2 cases: 1 passed, 1 ERROR, and 1 file without results; 2 s in cases" in text
    assert "  - out/result.json gave no results" in text


def test_a_case_that_was_skipped_before_the_version_was_known_stands_in_the_row_of_its_cell() -> None:
    early = result("a", "x", "skipped", engine_version="", reason="no speculation on a CPU")
    assert [row.label for row in summarise([early, result("a", "w")]).rows] == ["a"]
    assert [row.label for row in summarise([early]).rows] == ["a"]


def test_nothing_at_all() -> None:
    assert render([], 80, unicode=False) == "0 cases: none ran; 0 s in cases"
