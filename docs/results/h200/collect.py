#!/usr/bin/env python3
"""Results and evidence of one run: python collect.py ARTIFACTS OUT_STEM

Writes OUT_STEM.json (every case that has a result, also after a run that was cut short) and OUT_STEM.tgz: the
traces of what did not pass, and the ends of the servers' logs.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

from pytest_kvcheck.report.results import read_results, write_json

LOG_END = 60_000
MOST = 12_000_000  # of the archive; a file that is larger than 16 MiB does not come back


def main(artifacts: Path, stem: Path) -> None:
    results = read_results(artifacts)
    write_json(stem.with_suffix(".json"), results)
    with tarfile.open(stem.with_suffix(".tgz"), "w:gz") as tar:
        for result in results:
            if tar.fileobj is not None and tar.fileobj.tell() > MOST:
                break
            if result.outcome != "passed" and result.trace:
                tar.add(result.trace, f"{result.cell}/{Path(result.trace).parent.name}.jsonl")
            if result.outcome != "passed" and result.log:
                end = Path(result.log).read_bytes()[-LOG_END:]
                member = tarfile.TarInfo(f"{result.cell}/{Path(result.log).name}")
                member.size = len(end)
                tar.addfile(member, io.BytesIO(end))
    for result in results:
        print(result.outcome, f"{result.duration_s:.0f}s", result.id, result.reason[:300].replace("\n", " "))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
