"""``--kvcheck-scorer``: what clients saw, scored by another implementation on the same weights.

Nothing is asked of the server for it, so it runs behind everything else that a case asks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_kvcheck.engines.scorer import ScorerError, TransformersScorer
from pytest_kvcheck.launch.server import Server
from pytest_kvcheck.operations import Operation
from pytest_kvcheck.oracles.references import Emitted
from pytest_kvcheck.trace import OpRecord, Reply

FLOAT32 = "float32"
SCORER_IDS = 9_000_000
# Sequences of one workload that are scored; one may take seconds. What was retracted or aborted comes first.
MOST_SCORED = 16


class Independent:
    """Scores histories of any number of servers with ``chosen`` ("transformers" or "transformers=PYTHON").

    ``python`` is the engine's interpreter. Models stay loaded until :meth:`close`.
    """

    def __init__(self, chosen: str, python: str | None, progress: Callable[[str], None]) -> None:
        self._wanted = chosen.partition("=")[2]
        self._python, self._progress = python, progress
        self._scorers: dict[tuple[str, str], TransformersScorer] = {}
        self._refused: dict[tuple[str, str], ScorerError] = {}
        self._next = SCORER_IDS

    def score(self, server: Server, some: Iterable[Emitted], *, rounded: bool = False) -> list[OpRecord]:
        """A record of phase "scorer" for each sequence, as a scoring that the server might have given.

        ``rounded``: in the type that the server computes in; none where that is float32. Raises
        ``ScorerError`` (one paragraph) where they cannot be scored.
        """
        some = list(some)
        dtype = FLOAT32
        try:
            own = server.engine.precision(server.info)
        except LookupError as error:
            raise ScorerError(f"{error}, so another implementation need not agree") from None
        if rounded:
            dtype = own or "auto"
            if dtype == FLOAT32:
                return []
        if not some:
            return []
        model = server.engine.model_of(server.info)
        if not model:
            raise ScorerError("the server does not tell which model it serves")
        scorer = self._scorer(model, dtype)
        name = f"transformers {scorer.version} in {scorer.dtype}"
        return [self._record(name, one, scorer.score(one.ids)) for one in some]

    def close(self) -> None:
        """End every scorer. Safe to call again."""
        for scorer in self._scorers.values():
            scorer.close()
        self._scorers.clear()

    def _record(self, name: str, one: Emitted, scores: list[float | None]) -> OpRecord:
        self._next += 1
        op = Operation(
            id=self._next,
            kind="score",
            input_ids=one.ids,
            logprobs="input",
            target=one.record.op.id,
            label=name,
            stream=False,
        )
        return OpRecord(op=op, phase="scorer", reply=Reply(finish="length", input_logprobs=scores))

    def _scorer(self, model: str, dtype: str) -> TransformersScorer:
        key = (model, dtype)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._scorers:
            self._progress(f"loading {Path(model).name} into transformers ({dtype})")
            try:
                self._scorers[key] = TransformersScorer(model, self._interpreter(), dtype=dtype)
            except ScorerError as error:
                self._refused[key] = error
                raise
        return self._scorers[key]

    def _interpreter(self) -> str:
        """The one that was named; else the first of the engine's and ours that has transformers."""
        if self._wanted:
            return self._wanted
        candidates = dict.fromkeys(filter(None, (self._python, sys.executable)))
        found = next((python for python in candidates if _has_transformers(python)), None)
        if found is None:
            raise ScorerError(
                f"expected an interpreter with torch and transformers, found none in {', '.join(candidates)}; "
                "pip install 'pytest-kvcheck[scorer]', or name an interpreter that has both: "
                "--kvcheck-scorer transformers=PYTHON"
            )
        return found


def _has_transformers(python: str) -> bool:
    probe = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('torch', 'transformers'))))"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
