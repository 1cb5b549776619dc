"""The pytest plugin: options, collection of matrices, outcomes.

Everything that costs anything is imported inside the hook that needs it: a plain ``pytest`` run must not pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_kvcheck.fixtures import KvClient, KvLedger, KvServer
    from pytest_kvcheck.items import MatrixFile

ENGINES = ("reference", "sglang", "vllm")
SESSION_PLUGIN = "kvcheck-session"


def pytest_addoption(parser: pytest.Parser) -> None:
    # Help texts start with a capital and end without a stop, as pytest-xdist's do.
    group = parser.getgroup("kvcheck", "KV-cache checks of LLM inference servers (kvcheck)")
    add = group.addoption
    add(
        "--kvcheck-matrix",
        metavar="NAME|PATH",
        action="append",
        default=[],
        help="Run this matrix, as if its file had been given; a bare name is one that ships with the plugin, "
        "and NAME::CELL or NAME::CELL::WORKLOAD a part of it",
    )
    add(
        "--kvcheck-engine",
        choices=ENGINES,
        help="Run the cells on this engine instead of the matrix's own (ini: kvcheck_engine)",
    )
    add(
        "--kvcheck-url",
        metavar="URL",
        help="Attach to a running server on this machine; launch and stop nothing",
    )
    add(
        "--kvcheck-python",
        metavar="PATH",
        help="Interpreter of the engine's own environment (ini: kvcheck_python; default: this one)",
    )
    add(
        "--kvcheck-device",
        choices=("cpu", "cuda"),
        help="Device of the engine (ini: kvcheck_device; default: cpu)",
    )
    add("--kvcheck-seed", metavar="N", type=int, help="Seed of all plans (ini: kvcheck_seed; default: 0)")
    add("--kvcheck-repeat", metavar="N", type=int, default=1, help="Run each case N times (default: 1)")
    add(
        "--kvcheck-budget",
        metavar="SECONDS",
        type=float,
        help="Aim at this many seconds of load a case: fewer rounds, the same shape (ini: kvcheck_budget)",
    )
    add(
        "--kvcheck-patience",
        metavar="SECONDS",
        type=float,
        help="How long one request may take; a server that shows no token for that long is stuck "
        "(ini: kvcheck_patience; default: 120)",
    )
    add(
        "--kvcheck-gpus",
        metavar="auto|0,1",
        help="GPUs that cells may lease (ini: kvcheck_gpus; default: auto)",
    )
    add(
        "--kvcheck-artifacts",
        metavar="DIR",
        help="Where traces, gauges, logs and results go (ini: kvcheck_artifacts; default: .kvcheck)",
    )
    add(
        "--kvcheck-scorer",
        metavar="transformers[=PYTHON]",
        help="Score what clients saw with transformers on the same weights as well, so that an engine that is "
        "wrong in the same way every time is found (ini: kvcheck_scorer; PYTHON has torch and transformers; "
        "default: the engine's interpreter, then this one)",
    )
    add("--kvcheck-report", metavar="FILE.html", help="Write one self-contained HTML report")
    add("--kvcheck-json", metavar="FILE.json", help="Write the results as JSON (schema 1)")
    add("--kvcheck-shard", metavar="I/N", help="Run only the I-th of N parts of the launch keys (I from 1)")
    add(
        "--kvcheck-plant",
        metavar="FAULT",
        action="append",
        default=[],
        help="Plant a known fault in the reference engine (`kvcheck faults` lists them)",
    )
    add(
        "--kvcheck-silent",
        action="store_true",
        help="Turn the engine's own memory checks off, so that only the black-box oracles judge",
    )
    add(
        "--kvcheck-shrink",
        action="store_true",
        help="Minimise each failing case after its verdict: repro.py and issue.md beside its trace",
    )
    add(
        "--no-kvcheck-shrink",
        action="store_false",
        dest="kvcheck_shrink",
        help="Do not minimise failing cases (default)",
    )
    for name, what in (
        ("kvcheck_engine", "Engine to run the cells on"),
        ("kvcheck_python", "Interpreter of the engine's own environment"),
        ("kvcheck_device", "Device of the engine: cpu or cuda"),
        ("kvcheck_seed", "Seed of all plans"),
        ("kvcheck_budget", "Seconds of load to aim at a case"),
        ("kvcheck_patience", "Seconds that one request may take"),
        ("kvcheck_scorer", "Independent scorer: transformers or transformers=PYTHON"),
        ("kvcheck_gpus", "GPUs that cells may lease: auto, or numbers with commas"),
        ("kvcheck_artifacts", "Folder of traces, gauges, logs and results"),
    ):
        parser.addini(name, what)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "kvcheck(matrix, cells): run the test once for each of these cells of a matrix, with kv_server started",
    )
    if config.option.kvcheck_matrix:
        _add_matrices(config)
    if any(_may_be_matrix(argument) for argument in config.args):
        _activate(config)


def _add_matrices(config: pytest.Config) -> None:
    from pytest_kvcheck.matrix.loader import is_matrix_file, resolve

    for given in config.option.kvcheck_matrix:
        name, sep, case = given.partition("::")
        try:
            file = resolve(name)
        except LookupError as error:
            raise pytest.UsageError(f"--kvcheck-matrix: {error}") from error
        if not is_matrix_file(file):
            raise pytest.UsageError(
                f"--kvcheck-matrix: expected a matrix, found {name}, whose first key is not `kvcheck`"
            )
        path = f"{file}{sep}{case}"
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args.clear()
            config.args_source = pytest.Config.ArgsSource.ARGS
        if path not in config.args:
            config.args.append(path)


def _may_be_matrix(argument: str) -> bool:
    path = argument.split("::", 1)[0]
    return path.endswith((".yaml", ".yml"))


def _activate(config: pytest.Config) -> None:
    """Bring in the rest of the plugin: on the xdist controller too, which itself collects nothing."""
    if not config.pluginmanager.has_plugin(SESSION_PLUGIN):
        from pytest_kvcheck.session import KvSession

        config.pluginmanager.register(KvSession(config), SESSION_PLUGIN)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> MatrixFile | None:
    # Only a file that was named is collected: a YAML file in a test folder must never start a server.
    if file_path.suffix not in (".yaml", ".yml") or not parent.session.isinitpath(file_path):
        return None
    from pytest_kvcheck.matrix.loader import is_matrix_file

    if not is_matrix_file(file_path):
        return None
    _activate(parent.config)
    from pytest_kvcheck.items import MatrixFile

    if file_path.is_relative_to(parent.config.rootpath):
        return MatrixFile.from_parent(parent, path=file_path)
    # pytest leaves the path of a file outside its root folder out of node ids; then the file's name must do.
    return MatrixFile.from_parent(parent, path=file_path, nodeid=file_path.name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("kvcheck")
    if marker is None or "kv_server" not in metafunc.fixturenames:
        return
    _activate(metafunc.config)
    from pytest_kvcheck.items import cells_of_marker

    cells = cells_of_marker(marker, metafunc.config)
    metafunc.parametrize("kv_server", cells, indirect=True, ids=[cell.name for cell in cells])


@pytest.fixture
def kv_server(request: pytest.FixtureRequest) -> KvServer:
    """The running server of a cell that the test's ``kvcheck`` marker names; shared by tests of equal cells."""
    cell = getattr(request, "param", None)
    if cell is None:
        raise pytest.UsageError(
            f"{request.node.nodeid}: kv_server needs to know a cell; mark the test with "
            '@pytest.mark.kvcheck(matrix="llama", cells=["baseline"])'
        )
    from pytest_kvcheck.fixtures import KvServer
    from pytest_kvcheck.items import kv_session

    bed = kv_session(request.config).bench().bed_for(cell, request.node.nodeid)
    if bed.unfit:
        pytest.skip(bed.unfit)
    return KvServer(bed)


@pytest.fixture
def kv_client(kv_server: KvServer) -> Iterator[KvClient]:
    """A client of ``kv_server``: sessions, turns, plain requests, scoring; all by token ids."""
    from pytest_kvcheck.fixtures import client_of

    with client_of(kv_server.bed) as client:
        yield client


@pytest.fixture
def kv_ledger(kv_client: KvClient) -> KvLedger:
    """``with kv_ledger.expect_no_leak():`` fails where the server keeps what was used inside."""
    from pytest_kvcheck.fixtures import KvLedger

    return KvLedger(kv_client)
