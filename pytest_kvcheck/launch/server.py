"""One running server: started by us (any engine) or attached to, with what a judge needs to know of it."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import psutil

from pytest_kvcheck.cells import Cell, DeviceName
from pytest_kvcheck.client.control import Control
from pytest_kvcheck.engines.base import Engine, LaunchInputs
from pytest_kvcheck.launch.errors import LaunchError
from pytest_kvcheck.launch.gpus import GpuLease, lease_gpus
from pytest_kvcheck.launch.models import cache_dir, ensure_model
from pytest_kvcheck.launch.ports import lease_ports
from pytest_kvcheck.launch.process import EngineProcess
from pytest_kvcheck.launch.readiness import Startup, ask, check_interpreter, environment, not_ready
from pytest_kvcheck.observe import residue
from pytest_kvcheck.observe.logs import LogEvent
from pytest_kvcheck.observe.tail import LogTail
from pytest_kvcheck.oracles.base import ServerFacts

PORT_BOUND = 5.0
GPU_BOUND = 60.0  # a driver takes seconds to tens of seconds to reclaim after SIGKILL


class Server:
    """A server that takes requests. Made by :meth:`start` or :meth:`attach`; a context manager.

    ``info`` is the server's own account of its configuration; ``misfits`` says where it differs from the cell
    (always empty for a server that we started). ``clock`` dates log events; see :meth:`log_events`.
    """

    def __init__(
        self,
        engine: Engine,
        cell: Cell,
        control: Control,
        *,
        process: EngineProcess | None,
        pid: int | None,
        log: LogTail | None,
        gpus: GpuLease | None,
        resources: ExitStack,
    ) -> None:
        self.engine = engine
        self.cell = cell
        self.control = control
        self.base_url = control.base_url
        self.port = urlsplit(control.base_url).port or 80
        self.pid = pid
        self.info: dict[str, Any] = {}
        self.env: dict[str, str] = {}  # what its environment has beyond ours
        self.misfits: list[str] = []
        self.notes: tuple[str, ...] = ()  # where it differs from the cell's words
        self._process = process
        self._log = log
        self._gpus = gpus
        self._resources = resources
        self._maker = os.getpid()
        self._lock = threading.RLock()
        self._final: ServerFacts | None = None
        self._stopped_at: int | None = None  # the log's line when we began to stop it
        self._known: dict[int, residue.ProcessFacts] = {}
        self._before = residue.TreeSnapshot()

    @classmethod
    def start(
        cls,
        engine: Engine,
        cell: Cell,
        *,
        python: str,
        artifacts_dir: Path,
        device: DeviceName | None = None,
        gpus: str = "auto",
        settle: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Server:
        """Start the cell's server and return when it takes requests.

        ``python`` is the interpreter of the engine's environment, ``gpus`` what ``--kvcheck-gpus`` says,
        ``settle`` how many seconds the engine's children may outlive it before they count as left over.
        Raises ``LaunchError``; then nothing of the server is left.
        """
        device, artifacts_dir = device or cell.device, artifacts_dir.resolve()
        with ExitStack() as stack:
            artifacts_dir.mkdir(parents=True, exist_ok=True)
            inputs, lease = _prepare(engine, cell, python, device, gpus, stack)
            stack.callback(engine.close)
            engine.listen(cell)
            try:
                spec = engine.launch_spec(inputs)
            except (LookupError, ValueError) as error:
                raise LaunchError(f"cell {cell.name} ({cell.at}): {error}") from None
            env = environment({**_places(inputs.scratch), **(lease.env if lease else {}), **spec.env})
            log_path = _log_path(artifacts_dir, cell)
            process = EngineProcess(spec.argv, env, log_path, spec.stop_grace, settle, inputs.scratch)
            stack.callback(process.stop, hurry=True)
            log = LogTail(process.log_path, engine.log_rules(), clock)
            stack.callback(log.close)
            control = Control(f"http://127.0.0.1:{inputs.port}")
            stack.callback(control.close)
            startup = Startup(engine, cell, process, log, inputs.port, control)
            startup.wait(spec.ready_deadline)
            startup.check_ours()
            info = startup.identify()
            server = cls(
                engine,
                cell,
                control,
                process=process,
                pid=process.pid,
                log=log,
                gpus=lease,
                resources=stack.pop_all(),
            )
        server.info = info
        server.notes = spec.notes
        server.env = {name: value for name, value in spec.env.items() if value is not None}
        server._begin()
        atexit.register(server.stop)
        return server

    @classmethod
    def attach(
        cls,
        engine: Engine,
        url: str,
        cell: Cell,
        *,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Server:
        """Use a server that runs already on this machine; it is watched, and never stopped by us.

        Its process is found from its port, and its log where its output goes to a file. Raises ``LaunchError``.
        """
        try:
            control = Control(url)
            port = urlsplit(control.base_url).port or 80
        except ValueError as error:
            raise LaunchError(f"--kvcheck-url: {error}") from None

        def refused(what: str, next_step: str) -> LaunchError:
            return LaunchError(
                f"--kvcheck-url {url}: expected a ready {engine.name} server, found {what}. Next: {next_step}."
            )

        with ExitStack() as stack:
            stack.callback(control.close)
            deadline = time.monotonic() + timeout
            while not engine.ready(control):
                if time.monotonic() > deadline:
                    raise refused(*not_ready(engine, control, timeout))
                time.sleep(0.2)
            info = ask(engine, control, lambda what, step: refused(f"one that {what}", step))
            owner = residue.listener(port)
            pid = residue.topmost(owner.pids) if owner else None
            output = residue.stdout_file(pid) if pid else None
            log = LogTail(Path(output), engine.log_rules(), clock, skip_existing=True) if output else None
            if log is not None:
                stack.callback(log.close)
            server = cls(
                engine, cell, control, process=None, pid=pid, log=log, gpus=None, resources=stack.pop_all()
            )
        server.info = info
        server.misfits = engine.misfits(cell, info)
        server._begin()
        return server

    def _begin(self) -> None:
        self.mark()
        if self._gpus is not None:
            self._gpus.note_processes(frozenset(self._known))

    @property
    def attached(self) -> bool:
        """Whether somebody else started it."""
        return self._process is None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that started it; () where it was not ours."""
        return self._process.argv if self._process else ()

    # --- the process ---------------------------------------------------------------------------------
    def alive(self) -> bool:
        """Whether the engine's own process runs (whether anybody listens, where its process is not known)."""
        if self._process is not None:
            return self._process.alive()
        if self.pid is None:
            return residue.listener(self.port) is not None
        return bool(residue.still_alive(p for p in self._known.values() if p.pid == self.pid))

    def exit_status(self) -> int | None:
        """Exit code once it has ended (negative: a signal); None while it runs, or where it was not ours."""
        return self._process.exit_status() if self._process else None

    def snapshot(self) -> residue.TreeSnapshot:
        """Every process of the server now, orphans included where we started it."""
        if self._process is not None:
            tree = residue.snapshot(self._process.keeper, itself=False)
        else:
            tree = residue.snapshot(self.pid) if self.pid else residue.TreeSnapshot()
        self._known.update((process.pid, process) for process in tree.processes)
        return tree

    def mark(self) -> None:
        """Take descriptors and memory now as the "before" of the next :meth:`facts`."""
        self._before = self.snapshot()

    def facts(self) -> ServerFacts:
        """The server as it stands; after :meth:`stop`, as it was stopped."""
        with self._lock:
            if self._final is not None:
                return self._final
        alive, now = self.alive(), self.snapshot()
        # An engine may start helpers late (compile workers of torch), each with descriptors of its own.
        before, after = self._before.among(now) if alive else self._before, now.among(self._before)
        return ServerFacts(
            alive=alive,
            exit_code=self.exit_status(),
            attached=self.attached,
            fds_before=before.fds,
            fds_after=after.fds if alive else None,
            rss_before=before.rss or None,
            rss_after=after.rss or None if alive else None,
        )

    # --- the log -------------------------------------------------------------------------------------
    @property
    def log_path(self) -> Path | None:
        return self._log.path if self._log else None

    @property
    def log_line(self) -> int:
        """How many lines the log has now: ``since_line`` for what comes next."""
        self._drain()
        return self._log.line if self._log else 0

    def log_events(self, since_line: int = 0, origin: float = 0.0) -> list[LogEvent]:
        """Events after a line, with all that is written by now; their times count from ``origin``.

        ``origin`` is when a trace's clock began, on the clock that was given to :meth:`start`. Fatal lines that
        our own stop brought about are left out: an engine whose children got TERM says that it crashed.
        """
        if self._log is None:
            return []
        self._drain()
        events = [event for event in self._log.events(since_line) if self._counts(event)]
        return [replace(event, t=event.t - origin) for event in events] if origin else events

    def log_tail(self, lines: int = 40) -> list[str]:
        """The last lines of the log, the oldest first."""
        self._drain()
        return self._log.tail(lines) if self._log else []

    def first_fatal(self) -> LogEvent | None:
        """The first line that says that the engine is going down, other than by our stop."""
        self._drain()
        event = self._log.first_fatal() if self._log else None
        return event if event is not None and self._counts(event) else None

    def _counts(self, event: LogEvent) -> bool:
        return event.meaning != "fatal" or self._stopped_at is None or event.line <= self._stopped_at

    def _drain(self) -> None:
        if self._log is not None:
            self._log.drain(final=not self.alive())

    # --- the end -------------------------------------------------------------------------------------
    def stop(self) -> ServerFacts:
        """TERM, then KILL of everything; wait, bounded, until processes, port and GPU memory are gone.

        An attached server is left running. Safe to call again; also runs at the interpreter's exit.
        """
        if os.getpid() != self._maker:
            return ServerFacts()  # a fork of ours that ends: the server is not its to stop
        with self._lock:
            if self._final is None:
                facts = self.facts()
                self._final = facts if self._process is None else self._stop(self._process, facts)
                self._resources.close()
                atexit.unregister(self.stop)
            return self._final

    def _stop(self, process: EngineProcess, facts: ServerFacts) -> ServerFacts:
        if facts.alive:
            self._stopped_at = self.log_line
        if self._gpus is not None:
            self._gpus.note_processes(frozenset(self._known))
        ending = process.stop()
        leftovers = [*ending.leftovers, *(f"{each}, still there after SIGKILL" for each in ending.stuck)]
        # Only where both wardens were killed can anything of the tree be alive now.
        for known in residue.still_alive(self._known.values()):
            leftovers.append(str(known))
            try:
                psutil.Process(known.pid).kill()
            except psutil.Error:
                continue
        deadline = time.monotonic() + PORT_BOUND
        while (holder := residue.listener(self.port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return replace(
            facts,
            exit_code=ending.status if facts.alive else facts.exit_code,
            stopped=True,
            leftover_processes=tuple(leftovers),
            stop_forced=ending.forced and facts.alive,
            port_still_open=holder is not None,
            gpu_memory_left=self._gpus.memory_left(GPU_BOUND) if self._gpus else None,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()


def _prepare(
    engine: Engine,
    cell: Cell,
    python: str,
    device: DeviceName,
    gpus: str,
    stack: ExitStack,
) -> tuple[LaunchInputs, GpuLease | None]:
    """Everything that must be there before an engine starts; leases end with the stack."""
    try:
        if cell.command is None:
            python = check_interpreter(python)
            # What is installed decides flags and log rules until the server itself says what it is.
            engine.version = engine.version or engine.installed_version(python)
        model = ensure_model(cell.model.path, python)
        draft = ensure_model(cell.model.draft, python) if cell.model.draft else None
    except LookupError as error:
        raise LaunchError(f"cell {cell.name} ({cell.at}): {error.args[0] if error.args else error}") from None
    lease = None
    if device == "cuda":
        lease = lease_gpus(cell.features.tp, gpus, share=cell.features.gpu_memory)
        stack.callback(lease.close)
    ports = lease_ports()
    stack.callback(ports.close)
    # Short, and not below the artifacts: engines put sockets there, whose paths have 107 bytes at most.
    scratch = Path(tempfile.mkdtemp(prefix="kv-"))
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    return LaunchInputs(cell, ports.base, python, device, model, draft, scratch), lease


def _places(scratch: Path) -> dict[str, str]:
    """Temporary files go with the server; what torch compiled is worth keeping, in our cache."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(cache_dir().parent / "torchinductor")
    return {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": compiled}


def _log_path(folder: Path, cell: Cell) -> Path:
    """A name of its own for every launch: the log of a server that crashed is evidence."""
    stem = f"server-{re.sub(r'[^A-Za-z0-9._-]', '_', cell.name)}-{cell.launch_key}"
    path, again = folder / f"{stem}.log", 1
    while True:
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            again += 1
            path = folder / f"{stem}-{again}.log"
