"""The JSON format: exact keys, round trips, damaged files, merging; and what is known and what is not."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvcheck.report.results import (
    CaseResult,
    KnownRef,
    merge,
    read_results,
    write_json,
    write_result,
)
from tests.report_helpers import leak, result

PROMISED = [
    *("id", "engine", "engine_version", "cell", "workload", "outcome", "reason", "seed", "duration_s"),
    *("exercised", "findings", "trace", "repro"),
]
PROMISED_FINDING = ["kind", "oracle", "headline", "tokens", "pages", "pool", "owner", "evidence"]


def test_the_file_has_the_promised_keys(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    write_json(path, [result("baseline", "pre-abort", "leak", findings=[leak()])])
    document: dict[str, Any] = json.loads(path.read_text())
    assert list(document) == ["schema", "cases"]
    assert document["schema"] == 1
    (case,) = document["cases"]
    assert list(case)[: len(PROMISED)] == PROMISED
    (finding,) = case["findings"]
    assert set(PROMISED_FINDING) <= set(finding)
    assert (finding["tokens"], finding["pages"], finding["pool"]) == (256, 1, "full")
    assert [entry.name for entry in path.parent.iterdir()] == ["out.json"], "no temporary file is left"


def test_an_empty_run_is_a_valid_file(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", [])
    assert read_results(tmp_path / "out.json") == []


def test_results_survive_files_and_builtins(tmp_path: Path) -> None:
    known = [KnownRef(kind="K07", page="docs/findings/x.md", until="2027-01-01")]
    one = result("a", "pre-abort", "leak", findings=[leak()], known=known, noise_floor=0.01, lacks={"x": "y"})
    write_result(tmp_path / "a" / "pre-abort", one)
    assert read_results(tmp_path) == [one]
    assert msgspec.convert(msgspec.to_builtins(one), CaseResult) == one


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, [result("a", "pre-abort")])
    with pytest.raises(TypeError):
        write_json(path, [result("a", "pre-abort", exercised={"x": object()})])
    assert len(read_results(path)) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "found a damaged file"),
        ('{"schema": 1, "cases": [{"id": "x"', "found a damaged file"),
        ('{"schema": 1, "cases": [{"id": "x", "outcome": "fine"}]}', "found a damaged file"),
        ("[1, 2]", "found a damaged file"),
        ('{"schema": 2, "cases": []}', "expected schema 1, found 2"),
        ("\udcff", "found a damaged file"),
    ],
)
def test_a_damaged_file_is_a_result_and_the_others_are_read(text: str, found: str, tmp_path: Path) -> None:
    write_result(tmp_path / "b", result("b", "pre-abort"))
    damaged = tmp_path / "a" / "result.json"
    damaged.parent.mkdir()
    damaged.write_bytes(text.encode("utf-8", "surrogateescape"))
    bad, good = read_results(tmp_path)
    assert (bad.outcome, bad.id) == ("error", str(damaged))
    assert found in bad.reason
    assert good == result("b", "pre-abort")


def test_unknown_keys_of_a_later_release_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"schema": 1, "new": 1, "cases": [{"id": "m::c::w", "outcome": "passed", "later": [1]}]}')
    assert [each.outcome for each in read_results(path)] == ["passed"]


def test_no_results_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected an artifacts folder with result.json files, or"):
        read_results(tmp_path)


def test_merge_keeps_the_graver_result_of_a_case_and_both_engines(tmp_path: Path) -> None:
    write_result(tmp_path / "1" / "x", result("a", "pre-abort", "leak", findings=[leak()]))
    write_result(tmp_path / "2" / "x", result("a", "pre-abort"))
    write_result(tmp_path / "2" / "y", result("a", "pre-abort", engine="sglang"))
    write_json(tmp_path / "3.json", [result("b", "pre-abort", "skipped")])
    for places in (("1", "2", "3.json"), ("2", "3.json", "1")):
        found = {(each.cell, each.engine): each.outcome for each in merge(tmp_path / place for place in places)}
        assert found == {
            ("a", "reference"): "leak",
            ("a", "sglang"): "passed",
            ("b", "reference"): "skipped",
        }


def test_a_case_that_could_not_run_keeps_its_names() -> None:
    lost = CaseResult.failed_to_run("matrices/m.yaml::page-16::pre-abort#2", "worker 'gw0' crashed\n")
    assert (lost.cell, lost.workload, lost.outcome) == ("page-16", "pre-abort#2", "error")
    assert lost.reason == "worker 'gw0' crashed"


def test_known_findings_cover_only_their_kind_and_time() -> None:
    day = datetime.date(2026, 12, 1)
    both = [leak(), leak(kind="K03", status="mismatch")]
    known = [KnownRef(kind="K07", page="p.md", until="2026-12-01")]
    one = result("a", "pre-abort", "leak", findings=both, known=known)
    assert [finding.kind for finding in one.unexpected(day)] == ["K03"]
    assert one.stale(day) == []
    later = datetime.date(2026, 12, 2)
    assert [finding.kind for finding in one.unexpected(later)] == ["K07", "K03"]
    assert one.stale(later) == known
    gone = result("a", "pre-abort", known=known)
    assert gone.stale(day) == known
    assert not gone.expected


def test_known_findings_may_be_told_by_their_words() -> None:
    day = datetime.date(2026, 12, 1)
    known = [KnownRef(kind="K00", page="p.md", until="2027-01-01", text="a reused row")]
    crash = leak(kind="K00", status="crash", headline="AssertionError: a reused row must carry allocated KV")
    other = leak(kind="K00", status="crash", headline="IndexError: boom", evidence=("Log line 4: boom",))
    one = result("a", "fuzz", "crash", findings=[crash, other], known=known)
    assert one.unexpected(day) == [other]
    assert one.stale(day) == []
    assert result("a", "fuzz", "crash", findings=[other], known=known).stale(day) == known
    told = leak(kind="K00", status="crash", headline="it ended", evidence=("Log line 4: a reused row",))
    assert result("a", "fuzz", "crash", findings=[told], known=known).unexpected(day) == []


def test_text_tells_the_finding_and_where_to_go_on() -> None:
    text = result(
        "a", "pre-abort", "leak", findings=[leak()], reason="other", trace="t.jsonl", command="pytest x"
    ).text()
    assert text.splitlines()[0] == "LEAK other", "pytest's last lines quote the first line of it"
    for part in (
        "case:  matrices/llama.yaml::a::pre-abort",
        "256",
        "Owner: session s3",
        "trace: t.jsonl",
        "again: pytest x",
        "seed:  7",
        "other",
    ):
        assert part in text
    assert result("a", "b", "error", reason="boom").text() == "ERROR boom"
    known = result("a", "b", "leak", findings=[leak()], reason=leak().headline).text()
    assert known.startswith("LEAK K07 [conservation] after every session was closed")
