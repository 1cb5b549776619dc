"""Sampling, the joined series, and what processes leave behind."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
from launch_helpers import eventually

from pytest_kvcheck.observe import residue
from pytest_kvcheck.observe.gauges import Sampler
from pytest_kvcheck.observe.logs import LogEvent
from pytest_kvcheck.observe.timeline import explain_break, first_break, in_flight, series, unaccounted
from pytest_kvcheck.operations import Operation, OpKind
from pytest_kvcheck.trace import GaugeSample, OpRecord

# --- gauges ------------------------------------------------------------------------------------------


def test_samples_are_kept_and_written_as_they_happen(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gauges.jsonl"
    with Sampler(lambda t: GaugeSample(t=t, source="s"), time.monotonic, path, interval=0.01) as sampler:
        assert eventually(lambda: len(sampler.samples) >= 3 and path.exists())
        written = [msgspec.json.decode(line, type=GaugeSample) for line in path.read_bytes().splitlines()]
        assert written  # before the end
    samples = sampler.samples
    written = [msgspec.json.decode(line, type=GaugeSample) for line in path.read_bytes().splitlines()]
    assert written == samples
    assert samples == sorted(samples, key=lambda sample: sample.t)
    assert sampler.stop() == samples


def test_a_sample_that_fails_is_a_sample_with_an_error(tmp_path: Path) -> None:
    def fail(t: float) -> GaugeSample:
        raise KeyError("token_usage")

    with Sampler(fail, time.monotonic, tmp_path, interval=0.01) as sampler:  # a folder cannot be written
        assert eventually(lambda: len(sampler.samples) >= 2)
    assert sampler.samples[0].error == "KeyError: 'token_usage'"
    assert str(tmp_path) in sampler.write_error


def test_a_slow_server_is_asked_seldom() -> None:
    calls: list[float] = []

    def slow(t: float) -> GaugeSample:
        calls.append(time.monotonic())
        time.sleep(0.2)
        return GaugeSample(t=t, source="s")

    with Sampler(slow, time.monotonic, interval=0.01):
        assert eventually(lambda: len(calls) >= 3)
    assert min(after - before for before, after in itertools.pairwise(calls)) >= 1.9


def test_stop_does_not_wait_for_a_call_that_hangs() -> None:
    release = threading.Event()

    def hang(t: float) -> GaugeSample:
        release.wait(120)
        return GaugeSample(t=t, source="s")

    sampler = Sampler(hang, time.monotonic).start()
    assert sampler.stop(timeout=0.2) == []
    release.set()


# --- timeline ----------------------------------------------------------------------------------------


def account(line: int, t: float, pool: str = "full", **parts: int) -> LogEvent:
    fields: dict[str, int | float | str] = {"pool": pool, "total": 100, **parts}
    return LogEvent(t, line, "mem-check", "account", "", "", fields)


def record(number: int, started: float, ended: float, kind: OpKind = "turn") -> OpRecord:
    return OpRecord(op=Operation(id=number, kind=kind), started=started, ended=ended)


SOUND = [
    account(1, 1.0, available=100),
    account(2, 2.0, available=60, evictable=10, protected=10, session_held=15, uncached=5),
    account(2, 2.0, "swa", available=100),
]


def test_accounts_that_add_up_have_no_break() -> None:
    assert first_break(SOUND) is None
    assert explain_break(SOUND, []) is None
    other = LogEvent(1.0, 3, "retract", "retract", "", "", {"total": 3, "available": 1})
    unreadable = account(4, 4.0)  # this line tells no available tokens: no account
    assert first_break([other, unreadable]) is None


def test_the_first_break_is_explained_by_the_iteration_before_it_in_the_same_pool() -> None:
    broken = account(4, 4.0, available=62, evictable=10, protected=10, session_held=0, uncached=5)
    events = [*SOUND, account(3, 3.9, "swa", available=100), broken, account(5, 5.0, available=0)]
    assert first_break(events) is broken
    found = explain_break(
        events,
        [record(1, 0.0, 1.0), record(2, 1.5, 3.0), record(3, 3.5, 9.0), record(4, 6.0, 9.0)],
    )
    assert found is not None
    assert (found.event, found.before, found.pool, found.lost) == (broken, SOUND[1], "full", 13)
    assert found.moved == {"available": 2, "session_held": -15}
    assert [each.op.id for each in found.in_flight] == [2, 3]


def test_tokens_counted_twice_are_a_negative_loss_and_a_first_line_has_none_before() -> None:
    broken = account(1, 1.0, "swa", available=100, protected=8)
    found = explain_break([broken], [])
    assert found is not None
    assert (found.lost, found.before, found.pool, found.moved) == (-8, None, "swa", {})
    assert unaccounted(broken) == -8


def test_waits_and_barriers_are_never_in_flight() -> None:
    records = [record(1, 0.0, 9.0, "wait"), record(2, 0.0, 9.0, "barrier"), record(3, 0.0, 9.0, "abort")]
    assert [each.op.id for each in in_flight(records, 1.0, 2.0)] == [3]


def test_a_series_is_in_order_of_time() -> None:
    sample = GaugeSample(t=1.0, source="s")
    entries = series([sample], [account(1, 1.0, available=1)], [record(1, 1.0, 1.5)])
    assert [(entry.t, entry.what) for entry in entries] == [
        (1.0, "start"),
        (1.0, "log"),
        (1.0, "sample"),
        (1.5, "end"),
    ]


# --- residue -----------------------------------------------------------------------------------------

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
files = [open("/dev/null") for _ in range(20)]
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


def test_a_tree_is_seen_and_what_is_left_of_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    tree = residue.snapshot(parent.pid)
    assert tree.pids == {parent.pid, child}
    assert residue.snapshot(parent.pid, itself=False).pids == {child}
    assert tree.fds is not None
    assert tree.fds >= 23
    assert tree.rss > 1 << 20
    assert residue.topmost([child, parent.pid]) == parent.pid
    assert [each.pid for each in residue.still_alive(tree.processes)] == [parent.pid, child]
    parent.communicate(timeout=60)
    assert residue.still_alive(tree.processes) == []
    assert residue.snapshot(parent.pid) == residue.TreeSnapshot()


def test_a_pid_that_belongs_to_another_process_now_is_not_alive() -> None:
    (mine, *_) = residue.snapshot(os.getpid()).processes
    earlier = residue.ProcessFacts(mine.pid, mine.created - 100, mine.words, mine.rss, mine.fds)
    assert residue.still_alive([earlier]) == []


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = residue.listener(port)
        assert found is not None
        assert found.pids == {os.getpid()}
        assert f"pid {os.getpid()} (" in str(found)
    assert residue.listener(port) is None
    assert str(residue.Listener(1, frozenset())) == "a process of another user"


def test_the_file_that_a_process_writes_to(tmp_path: Path) -> None:
    with (tmp_path / "out.log").open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], stdout=file, stderr=file
        )
    try:
        assert residue.stdout_file(process.pid) == str(tmp_path / "out.log")
    finally:
        process.kill()
        process.wait(60)
    assert residue.stdout_file(process.pid) is None
