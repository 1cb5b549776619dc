#!/usr/bin/env python3
"""Results for the repository: python tidy.py OUT.json RESULTS.json...

Of each case the gravest result is kept; paths of the machine become names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from msgspec.structs import replace

from pytest_kvcheck.report.results import CaseResult, merge, write_json

PATHS = (
    (re.compile(r"/tmp/kvcache/models/([\w-]+)-[0-9a-f]{12}"), r"\1"),
    (re.compile(r"/tmp/(laguna|a-[\w-]+|m)/"), r"\1/"),
    (re.compile(r"/\S*/bin/python3"), "python3"),
)


def plain(text: str) -> str:
    for pattern, name in PATHS:
        text = pattern.sub(name, text)
    return text


def tidied(results: list[CaseResult]) -> list[CaseResult]:
    """Traces and logs stayed on the device; a server's command stands with the first of its cases."""
    told: set[str] = set()
    out = []
    for result in results:
        argv = [] if result.launch_key in told else [plain(word) for word in result.argv]
        told.add(result.launch_key)
        out.append(replace(result, argv=argv, trace="", log="", judged=[], reason=plain(result.reason)))
    return out


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), tidied(merge(Path(name) for name in sys.argv[2:])))
