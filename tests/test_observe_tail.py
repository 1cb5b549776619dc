"""The log is read whole: from its first byte, whatever bytes it holds, to a last line without an end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvcheck.observe import tail as module
from pytest_kvcheck.observe.logs import LogRule
from pytest_kvcheck.observe.tail import LogTail

RULES = (
    LogRule("mem", re.compile(r"\[(?P<pool>\w+)\] total=(?P<total>\d+)"), "account"),
    LogRule("down", re.compile(r"SIGQUIT received"), "fatal"),
    LogRule("leak", re.compile(r"leak detected"), "leak", "K01"),
)

Open = Callable[..., LogTail]


@pytest.fixture
def follow() -> Iterator[Open]:
    opened: list[LogTail] = []

    def make(path: Path, **options: bool) -> LogTail:
        opened.append(LogTail(path, RULES, **options))
        return opened[-1]

    yield make
    for log in opened:
        log.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_events_of_every_line_and_every_pool_of_a_line(tmp_path: Path, follow: Open) -> None:
    path = tmp_path / "log"
    log = follow(path)  # before there is a file
    append(path, b"start\n[full] total=10 [swa] total=4\nleak detected\nSIG")
    assert log.drain(60)
    assert [(event.line, event.rule) for event in log.events()] == [(2, "mem"), (2, "mem"), (3, "leak")]
    assert [event.fields for event in log.events()][:2] == [
        {"pool": "full", "total": 10},
        {"pool": "swa", "total": 4},
    ]
    assert log.first_fatal() is None
    append(path, b"QUIT received\n")  # a line that came in two writes
    assert log.drain(60)
    fatal = log.first_fatal()
    assert fatal is not None
    assert fatal.line == 4
    assert [event.rule for event in log.events(since_line=3)] == ["down"]


def test_a_last_line_without_an_end_counts_once_the_writer_is_gone(tmp_path: Path, follow: Open) -> None:
    path = tmp_path / "log"
    append(path, b"one\nleak detected")
    log = follow(path)
    assert log.drain(60)
    assert log.events() == []
    assert log.drain(60, final=True)
    assert [event.line for event in log.events()] == [2]


def test_close_reads_what_was_written_before_it(tmp_path: Path, follow: Open) -> None:
    path = tmp_path / "log"
    log = follow(path)
    append(path, b"x\n" * 50_000 + b"leak detected")
    log.close()
    assert [event.line for event in log.events()] == [50_001]
    assert log.line == 50_001


def test_bytes_that_are_no_text_and_lines_without_end(tmp_path: Path, follow: Open) -> None:
    path = tmp_path / "log"
    log = follow(path)
    append(path, b"\xff\xfe\x00 leak detected\n" + b"y" * 3_000_000 + b" leak detected\n[full] total=1\n")
    assert log.drain(60)
    assert [(event.line, event.rule) for event in log.events()] == [(1, "leak"), (3, "mem")]
    assert len(log.tail(2)[0]) == module.MAX_LINE


def test_a_progress_bar_does_not_hide_the_line_behind_it(tmp_path: Path, follow: Open) -> None:
    path = tmp_path / "log"
    log = follow(path)
    append(path, b" 10%|#\r 90%|####\rleak detected\r\nnext\n")
    assert log.drain(60)
    assert [(event.line, event.text) for event in log.events()] == [(1, "leak detected")]
    assert log.tail(9) == ["leak detected", "next"]
    assert log.tail(0) == []


def test_what_was_there_before_we_attached_is_counted_and_not_judged(tmp_path: Path, follow: Open) -> None:
    path = tmp_path / "log"
    append(path, b"leak detected\nSIGQUIT received\n")
    log = follow(path, skip_existing=True)
    append(path, b"leak detected\n")
    assert log.drain(60)
    assert [event.line for event in log.events()] == [3]
    assert log.first_fatal() is None


def test_a_file_that_never_comes_is_empty(tmp_path: Path, follow: Open) -> None:
    log = follow(tmp_path / "none")
    assert log.drain(60)
    assert (log.events(), log.tail(9), log.line) == ([], [], 0)


def test_an_endless_series_is_bounded_and_keeps_what_accuses(
    tmp_path: Path, follow: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 100)
    path = tmp_path / "log"
    log = follow(path)
    append(path, b"leak detected\n" + b"[full] total=1\n" * 500)
    assert log.drain(60)
    assert log.events()[0].rule == "leak"
    assert len(log.events()) <= 100
    assert len(log.events()) + log.dropped == 501
