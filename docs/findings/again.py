#!/usr/bin/env python3
"""Start a server of servers.yaml as kvcheck does, and run programs of this folder against it.

usage: python docs/findings/again.py CELL PROGRAM.py [PROGRAM.py ...]    e.g. rows-4 sglang_37583.py
A program's own arguments stand in one word with it: plain "sglang_token_ids.py 512 --crash".

The engine is the one that the first program is named for; its interpreter is KVCHECK_SGLANG_PYTHON or
KVCHECK_VLLM_PYTHON (`python -m pytest_kvcheck.engines.sglang_cpu.install` makes one for a CPU).
KVCHECK_DEVICE=cuda runs it on a GPU. The exit code is the last program's that is not 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_kvcheck.cells import ENGINE_NAMES, DeviceName
from pytest_kvcheck.engines import make_engine
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.matrix.loader import load
from pytest_kvcheck.workloads import parameter_names

HERE = Path(__file__).resolve().parent


def main(name: str, programs: list[str]) -> int:
    engine = next(each for each in ENGINE_NAMES if programs[0].startswith(each))
    device: DeviceName = "cuda" if os.environ.get("KVCHECK_DEVICE") == "cuda" else "cpu"
    cells = load(HERE / "servers.yaml", engine=engine, device=device, workload_names=parameter_names())
    (cell,) = (each for each in cells if each.name == name)
    python = os.environ[f"KVCHECK_{engine.upper()}_PYTHON"]
    worst = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Server.start(make_engine(engine), cell, python=python, artifacts_dir=Path(folder)) as server,
    ):
        print(" ".join(server.argv), flush=True)
        for program in programs:
            file, *more = program.split()
            print(f"$ {file} {server.base_url} {' '.join(more)}", flush=True)
            ended = subprocess.run([sys.executable, str(HERE / file), server.base_url, *more]).returncode
            until = time.monotonic() + (10 if ended else 0)  # a crash takes some seconds to be told
            while server.first_fatal() is None and time.monotonic() < until:
                time.sleep(0.5)
            said = [event.text for event in server.log_events() if event.meaning in ("leak", "fatal")]
            print(f"exit {ended}; its log: {'; '.join(said[:2]) or 'nothing fatal'}", flush=True)
            worst = ended or worst
    return worst


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
