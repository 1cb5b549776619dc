"""Whatever ends, and however: nothing of an engine stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
from launch_helpers import eventually, marked

from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.process import EngineProcess

# An engine with every kind of child: one in its group, one in another session, a double-forked daemon. All of
# them ignore TERM, and say "up" when they do.
ENGINE = r"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
CHILD = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", CHILD])
subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", CHILD])
    os._exit(0)
os.wait()
print("engine up", flush=True)
if sys.argv[1] == "ends":
    sys.exit(3)
if sys.argv[1] == "heeds":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    print("heeds", flush=True)
time.sleep(600)
"""
CHILDREN = 3

# An engine that has memory of the machine (a segment, a semaphore) and a temporary file, and does not clear up.
LITTER = r"""
import os, signal, sys, time
from multiprocessing import get_context, resource_tracker, shared_memory
resource_tracker.register = lambda name, kind: None  # as where an engine kills its own tracker
segment = shared_memory.SharedMemory(create=True, size=4096)
lock = get_context("spawn").Lock()
open(os.path.join(os.environ["TMPDIR"], "socket"), "w").close()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(segment.name, lock._semlock.name.lstrip("/"), flush=True)
if sys.argv[1] == "ends":
    time.sleep(5)  # a warden's looks are two seconds apart
    os._exit(1)
time.sleep(600)
"""

# A process that starts the engine as the plugin does, says so, and then does what the test makes of it.
OWNER = r"""
import os, sys, time
from pathlib import Path
from pytest_kvcheck.launch.process import EngineProcess
engine = EngineProcess([sys.executable, "-c", sys.argv[1], "stays"], os.environ, Path(sys.argv[2]), grace=1.0)
print(engine.pid, engine.keeper, flush=True)
if sys.argv[3] == "forks" and os.fork() == 0:
    time.sleep(600)  # holds a copy of the write end of the warden's command pipe
time.sleep(600)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    for process in marked(name):
        process.kill()


def engine(mark: str, folder: Path, how: str, grace: float = 1.0, settle: float = 1.0) -> EngineProcess:
    env = {**os.environ, "KVCHECK_TEST_MARK": mark}
    process = EngineProcess([sys.executable, "-c", ENGINE, how], env, folder / "engine.log", grace, settle)
    return process


def all_up(folder: Path, last: str = "engine up") -> bool:
    lines = (folder / "engine.log").read_text().splitlines()
    return lines.count("up") == CHILDREN and last in lines


def test_output_is_in_the_log_from_the_first_byte_and_the_status_is_the_engines(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(41)"
    process = EngineProcess([sys.executable, "-c", code], os.environ, tmp_path / "engine.log")
    assert process.wait(60)
    assert process.exit_status() == 41
    ending = process.stop()
    assert (ending.status, ending.forced, ending.leftovers, ending.stuck) == (41, False, (), ())
    assert sorted((tmp_path / "engine.log").read_text().split()) == ["err", "out"]


def test_exactly_the_given_environment_arrives(tmp_path: Path) -> None:
    odd = {"A": "1", "ODD": "é\udcff\n"}
    code = "import os; print(sorted(os.environb.items()))"
    process = EngineProcess([sys.executable, "-I", "-c", code], odd, tmp_path / "engine.log")
    assert process.wait(60)
    process.stop()
    seen = dict(eval((tmp_path / "engine.log").read_text()))
    assert seen[b"A"] == b"1"
    assert seen[b"ODD"] == "é\udcff\n".encode(errors="surrogateescape")
    assert set(seen) <= {b"A", b"ODD", b"LC_CTYPE"}


def test_a_program_that_cannot_be_executed_is_one_paragraph(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"expected to start '/no/such/program', found no such file or directory; "
    ):
        EngineProcess(["/no/such/program", "--flag"], os.environ, tmp_path / "engine.log")


def test_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    process = EngineProcess([sys.executable, "-c", code], os.environ, tmp_path / "engine.log")
    assert process.wait(60)
    assert process.exit_status() == -signal.SIGKILL
    process.stop()


def test_stop_kills_an_engine_that_ignores_term_with_all_that_it_started(mark: str, tmp_path: Path) -> None:
    process = engine(mark, tmp_path, "stays")
    assert eventually(lambda: all_up(tmp_path))
    ending = process.stop()
    assert marked(mark) == []
    assert ending.status == -signal.SIGKILL
    assert ending.forced
    assert ending.leftovers == ()  # they had no chance to end in order: not the engine's fault
    assert process.stop() is ending
    assert not process.alive()


def test_children_that_outlive_an_engine_that_heeds_term_are_named_and_killed(
    mark: str, tmp_path: Path
) -> None:
    process = engine(mark, tmp_path, "heeds", grace=60.0)
    assert eventually(lambda: all_up(tmp_path, "heeds"))
    pids = {each.pid for each in marked(mark) if not is_warden(each)} - {process.pid}
    ending = process.stop()
    assert marked(mark) == []
    assert (ending.status, ending.forced) == (0, False)
    assert len(ending.leftovers) == CHILDREN
    assert {int(text.split()[1]) for text in ending.leftovers} == pids


def test_children_that_end_soon_after_the_engine_are_no_leftovers(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)'])"
    process = EngineProcess([sys.executable, "-c", code], os.environ, tmp_path / "e.log", settle=60.0)
    assert process.stop().leftovers == ()


def test_children_of_an_engine_that_ended_by_itself_are_killed_without_being_asked(
    mark: str, tmp_path: Path
) -> None:
    process = engine(mark, tmp_path, "ends")
    assert process.wait(60)
    assert eventually(lambda: not marked(mark))
    ending = process.stop()
    assert ending.status == 3
    assert len(ending.leftovers) == CHILDREN


def is_warden(process: psutil.Process) -> bool:
    return any(word.endswith("warden.py") for word in process.cmdline())


def start_owner(mark: str, folder: Path, how: str = "waits") -> tuple[subprocess.Popen[bytes], int, int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, ENGINE, str(folder / "engine.log"), how],
        stdout=subprocess.PIPE,
        env={**os.environ, "KVCHECK_TEST_MARK": mark},
    )
    assert owner.stdout is not None
    pid, keeper = map(int, owner.stdout.readline().split())
    owner.stdout.close()
    assert eventually(lambda: all_up(folder))
    return owner, pid, keeper


def test_nothing_outlives_a_killed_owner(mark: str, tmp_path: Path) -> None:
    owner, _, _ = start_owner(mark, tmp_path)
    owner.kill()
    owner.wait(60)
    assert eventually(lambda: not marked(mark))


def test_nothing_outlives_a_killed_owner_whose_fork_holds_the_pipe_open(mark: str, tmp_path: Path) -> None:
    owner, pid, _ = start_owner(mark, tmp_path, "forks")
    owner.kill()
    owner.wait(60)
    # The fork is the test's own; everything of the engine must go although the pipe has no end yet.
    assert eventually(lambda: not psutil.pid_exists(pid) and len(marked(mark)) == 1)


def litter(mark: str, folder: Path, how: str) -> tuple[EngineProcess, list[Path]]:
    """A littering engine, and what it has made."""
    temporary = folder / "temporary"
    temporary.mkdir()
    env = {**os.environ, "KVCHECK_TEST_MARK": mark, "TMPDIR": str(temporary)}
    argv, log = [sys.executable, "-c", LITTER, how], folder / "engine.log"
    process = EngineProcess(argv, env, log, 60.0, temporary=temporary)
    assert eventually(lambda: len(log.read_text().split()) == 2)
    segment, lock = log.read_text().split()
    made = [Path("/dev/shm", segment), Path("/dev/shm", f"sem.{lock}"), temporary]
    assert all(path.exists() for path in made)
    return process, made


@pytest.mark.parametrize("how", ["stopped", "ends", "inner", "outer"])
def test_no_file_and_no_shared_memory_outlives_an_engine(how: str, mark: str, tmp_path: Path) -> None:
    process, made = litter(mark, tmp_path, how)
    held = shared_memory.SharedMemory(create=True, size=4096)
    try:
        if how == "ends":
            assert process.wait(60)
        elif how in ("inner", "outer"):
            time.sleep(5)  # a warden's looks are two seconds apart
            inner = psutil.Process(process.keeper)
            (inner if how == "inner" else inner.parent()).kill()
        process.stop()
        assert eventually(lambda: not any(path.exists() for path in made))
        assert Path("/dev/shm", held.name).exists()
    finally:
        held.close()
        held.unlink()


def test_shared_memory_that_another_process_has_mapped_stays(mark: str, tmp_path: Path) -> None:
    process, made = litter(mark, tmp_path, "stopped")
    ours = shared_memory.SharedMemory(made[0].name)
    try:
        process.stop()
        assert [path.exists() for path in made] == [True, False, False]
    finally:
        ours.close()
        ours.unlink()


@pytest.mark.parametrize("which", ["inner", "outer"])
def test_nothing_outlives_a_killed_warden(which: str, mark: str, tmp_path: Path) -> None:
    process = engine(mark, tmp_path, "stays")
    assert eventually(lambda: all_up(tmp_path))
    inner = psutil.Process(process.keeper)
    (inner if which == "inner" else inner.parent()).kill()
    assert eventually(lambda: not marked(mark))
    assert eventually(lambda: not process.alive())
    process.stop()
    assert eventually(lambda: not inner.is_running())


def test_nothing_outlives_owner_and_inner_warden_killed_at_once(mark: str, tmp_path: Path) -> None:
    owner, _, keeper = start_owner(mark, tmp_path)
    os.kill(keeper, signal.SIGKILL)
    owner.kill()
    owner.wait(60)
    assert eventually(lambda: not marked(mark))


# A pytest run whose test starts the engine and then waits for its end.
TEST_FILE = r"""
import os, sys, time
from pathlib import Path
import pytest
from pytest_kvcheck.launch.process import EngineProcess

@pytest.fixture(scope="module")
def engine():
    argv = [sys.executable, "-c", os.environ["ENGINE"], "stays"]
    process = EngineProcess(argv, os.environ, Path("engine.log"), 1.0)
    yield process
    process.stop()

def test_one(engine):
    while len(open("engine.log").read().splitlines()) < 4:
        time.sleep(0.05)
    Path("pid").write_text(str(os.getpid()))
    Path("pid").rename("up")
    if os.environ["HOW"] == "fails":
        pytest.fail("on purpose")
    time.sleep(600)

def test_two(engine):
    Path("two").touch()
"""


def run_pytest(mark: str, folder: Path, how: str, *options: str) -> subprocess.Popen[bytes]:
    (folder / "test_it.py").write_text(TEST_FILE)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "ENGINE": ENGINE, "HOW": how, "KVCHECK_TEST_MARK": mark},
    )


def test_nothing_outlives_an_interrupted_pytest(mark: str, tmp_path: Path) -> None:
    run = run_pytest(mark, tmp_path, "waits")
    assert eventually((tmp_path / "up").exists)
    run.send_signal(signal.SIGINT)
    assert run.wait(120) == pytest.ExitCode.INTERRUPTED
    assert marked(mark) == []


def test_nothing_outlives_a_pytest_that_stops_at_the_first_failure(mark: str, tmp_path: Path) -> None:
    run = run_pytest(mark, tmp_path, "fails", "-x")
    assert run.wait(120) == pytest.ExitCode.TESTS_FAILED
    assert not (tmp_path / "two").exists()
    assert marked(mark) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_pytest(number: int, mark: str, tmp_path: Path) -> None:
    run = run_pytest(mark, tmp_path, "waits")
    assert eventually((tmp_path / "up").exists)
    run.send_signal(number)
    run.wait(120)
    assert eventually(lambda: not marked(mark))


def test_nothing_outlives_a_killed_xdist_worker(mark: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    run = run_pytest(mark, tmp_path, "waits", "-n", "1", "--max-worker-restart", "0")
    assert eventually((tmp_path / "up").exists)
    os.kill(int((tmp_path / "up").read_text()), signal.SIGKILL)  # the worker; the controller lives
    run.wait(120)
    assert eventually(lambda: not marked(mark))
