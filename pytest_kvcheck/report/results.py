"""The result of a case, and the stable JSON format (schema 1) that carries results between processes.

The same format stands in ``--kvcheck-json`` and in every case's ``result.json``, so each can be merged.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pytest_kvcheck.findings import SEVERITY, Finding, Outcome

SCHEMA = 1
RESULT_FILE = "result.json"

# Gravest first: of two results for one case the graver is kept, so that merging hides nothing.
GRAVITY: tuple[Outcome, ...] = ("error", *SEVERITY, "passed", "skipped")


class KnownRef(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that the matrix expects until a day: ``page`` explains it, ``until`` is YYYY-MM-DD.

    ``sometimes``: a run without it is no surprise, and makes nothing stale. ``text``: its words, where the kind
    alone would excuse too much.
    """

    kind: str
    page: str
    until: str
    sometimes: bool = False
    text: str = ""

    def covers(self, finding: Finding) -> bool:
        """Whether this is the finding that is expected."""
        return finding.kind == self.kind and self.text in "\n".join((finding.headline, *finding.evidence))


class CaseResult(msgspec.Struct, kw_only=True):
    """What became of one case.

    The fields up to ``repro`` are the promised format; those behind it may grow. ``trace``, ``repro`` and
    ``log`` are paths, "" where there is none. ``noise_floor`` is the greatest log-prob difference that this
    launch's own controls showed, in nats. ``judged`` names the oracles that gave a verdict; ``lacks`` says why
    an oracle or gauge is absent on this version, ``notes`` where the server differs from the cell's words.
    ``argv`` started the server; ``command`` runs the case again.
    """

    id: str
    engine: str = ""
    engine_version: str = ""
    cell: str = ""
    workload: str = ""
    outcome: Outcome
    reason: str = ""
    seed: int = 0
    duration_s: float = 0.0
    exercised: dict[str, int] = {}
    findings: list[Finding] = []
    trace: str = ""
    repro: str = ""
    family: str = ""
    device: str = ""
    launch_key: str = ""
    noise_floor: float | None = None
    judged: list[str] = []
    lacks: dict[str, str] = {}
    notes: list[str] = []
    argv: list[str] = []
    command: str = ""
    log: str = ""
    known: list[KnownRef] = []

    @classmethod
    def failed_to_run(cls, case_id: str, reason: str) -> CaseResult:
        """The result of a case that could not be judged at all; its id says which cell and workload it was."""
        _, _, names = case_id.partition("::")
        cell, _, workload = names.partition("::")
        return cls(id=case_id, cell=cell, workload=workload, outcome="error", reason=reason.strip())

    def unexpected(self, today: datetime.date | None = None) -> list[Finding]:
        """The findings that no unexpired ``known`` entry covers."""
        day = (today or datetime.date.today()).isoformat()
        valid = [known for known in self.known if day <= known.until]
        return [finding for finding in self.findings if not any(known.covers(finding) for known in valid)]

    def stale(self, today: datetime.date | None = None) -> list[KnownRef]:
        """The ``known`` entries that have expired, or whose finding did not appear."""
        day = (today or datetime.date.today()).isoformat()
        return [
            known
            for known in self.known
            if known.until < day or not (known.sometimes or any(map(known.covers, self.findings)))
        ]

    @property
    def expected(self) -> bool:
        """Whether everything that was found is known and unexpired."""
        return bool(self.findings) and not self.unexpected()

    def text(self) -> str:
        """The result for a person: what is wrong (pytest's last lines quote the first line), where to go on."""
        blocks = [finding.paragraph() for finding in self.findings]
        if not any(self.reason in finding.headline for finding in self.findings):
            blocks.insert(0, f"{self.outcome.upper()} {self.reason or 'without a reason'}")
        places = {"trace": self.trace, "repro": self.repro, "log": self.log, "again": self.command}
        given = [f"{name + ':':7}{place}" for name, place in places.items() if place]
        if given:
            blocks.append("\n".join([f"case:  {self.id}", f"seed:  {self.seed}", *given]))
        return "\n\n".join(blocks)


class _Document(msgspec.Struct, kw_only=True):
    schema: int
    cases: list[CaseResult]


class _Version(msgspec.Struct):
    schema: int


def write_json(path: Path, results: Sequence[CaseResult]) -> None:
    """Write results as one JSON file; a reader sees the old file or the new one, never a part.

    Raises ``OSError`` where the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = msgspec.json.encode(_Document(schema=SCHEMA, cases=list(results)))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(raw, indent=1) + b"\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_result(folder: Path, result: CaseResult) -> Path:
    """Write the result of one case into its artifacts folder."""
    path = folder / RESULT_FILE
    write_json(path, [result])
    return path


def _read_file(path: Path) -> list[CaseResult]:
    """The results of one file; a file that cannot be read is itself a result, so that nothing is lost."""
    try:
        raw = path.read_bytes()
        version = msgspec.json.decode(raw, type=_Version).schema
        if version != SCHEMA:
            reason = f"expected schema {SCHEMA}, found {version}; a later kvcheck wrote this file"
            return [CaseResult.failed_to_run(str(path), reason)]
        return msgspec.json.decode(raw, type=_Document).cases
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = f"expected the results of a kvcheck run, found a damaged file: {error}"
        return [CaseResult.failed_to_run(str(path), reason)]


def read_results(place: Path) -> list[CaseResult]:
    """The results of an artifacts folder (every ``result.json`` below it) or of one ``--kvcheck-json`` file,
    in a fixed order. A damaged file gives a result with the outcome ``error``.

    Raises ``FileNotFoundError`` (with what to do) where there are none.
    """
    files = [place] if place.is_file() else sorted(place.rglob(RESULT_FILE))
    if not files:
        raise FileNotFoundError(
            f"expected an artifacts folder with {RESULT_FILE} files, or a --kvcheck-json file, "
            f"found none at {place}"
        )
    return _keep_gravest(result for path in files for result in _read_file(path))


def merge(places: Iterable[Path]) -> list[CaseResult]:
    """The results of several folders or JSON files as one. Raises ``FileNotFoundError`` as above."""
    return _keep_gravest(result for place in places for result in read_results(place))


def _keep_gravest(results: Iterable[CaseResult]) -> list[CaseResult]:
    kept: dict[tuple[str, str, str, str], CaseResult] = {}
    for result in results:
        key = (result.id, result.engine, result.engine_version, result.device)
        before = kept.get(key)
        if before is None or GRAVITY.index(result.outcome) < GRAVITY.index(before.outcome):
            kept[key] = result
    return list(kept.values())
