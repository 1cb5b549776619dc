"""An independent judge of log-probs: transformers on the same weights, in a process of its own.

An engine that is wrong in the same way every time (position, window, rotary angle) agrees with itself, however
often it is asked again; it does not agree with another implementation.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_WORKER = Path(__file__).with_name("transformers_worker.py")


class ScorerError(Exception):
    """The scorer cannot answer; the message is one paragraph for the user."""


class TransformersScorer:
    """Scores token histories by teacher forcing, on the CPU; in float32 if no other ``dtype`` is named.

    ``model_dir`` is a folder with weights and ``python`` an interpreter that has torch and transformers (SGLang
    and vLLM bring both). Starting it imports torch and loads the model, seconds for a tiny one. One request at
    a time; not for several threads at once. A draft model changes nothing in what is scored. ``dtype`` "auto"
    is that of the weights; the attribute says which it is.

    Raises :class:`ScorerError` where transformers is missing or does not know the model, in the constructor as
    in :meth:`score`; ``deadline`` (seconds) bounds each wait.
    """

    def __init__(self, model_dir: str, python: str, deadline: float = 300.0, dtype: str = "float32") -> None:
        self.model_dir, self.python, self.deadline = model_dir, python, deadline
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process that writes to it
        # The worker's folder holds modules of ours that must not shadow others on its path.
        env = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER), model_dir, dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=env,
            )
        except OSError as error:
            self._log.close()
            raise ScorerError(
                f"the transformers scorer cannot start: {python} does not run ({error.strerror}). Name an "
                "interpreter that has torch and transformers with --kvcheck-scorer transformers=PYTHON."
            ) from None
        try:
            hello = self._answer()
        except ScorerError:
            self.close()
            raise
        self.model_class: str = hello["model"]
        self.version: str = hello["transformers"]
        self.dtype: str = hello.get("dtype", dtype)

    def score(self, ids: Sequence[int]) -> list[float | None]:
        """The natural log-prob of ``ids[i]`` given ``ids[:i]``; None at 0. As long as ``ids``, at least one."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(ids)}).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise ScorerError(f"the transformers scorer is gone{self._last_words()}") from None
        scores: list[float | None] = self._answer()["logprobs"]
        return scores

    def close(self) -> None:
        """End the process: it ends by itself when its input does, and is killed if it does not. Repeatable."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the process went away with a request unread
                    pipe.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._log.close()

    def __enter__(self) -> TransformersScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self.deadline)
        if not ready:
            raise ScorerError(
                f"the transformers scorer did not answer in {self.deadline:.0f} s{self._last_words()}"
            )
        line = self._process.stdout.readline()
        if not line:
            raise ScorerError(f"the transformers scorer went away{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ScorerError(self._explained(answer["error"]))
        return answer

    def _explained(self, error: str) -> str:
        where = f"{self.python} with {self.model_dir}"
        if error.startswith(("ModuleNotFoundError", "ImportError")):
            return (
                f"the transformers scorer cannot run: {where} says {error}. Install torch and transformers "
                "there, or name another interpreter with --kvcheck-scorer transformers=PYTHON."
            )
        if "does not recognize this architecture" in error or "Unrecognized" in error:
            return (
                f"the transformers scorer does not support this model: {error.splitlines()[0]} ({where}). "
                "Use a newer transformers, or score without it."
            )
        return f"the transformers scorer failed ({where}): {' '.join(error.split())[:600]}"

    def _last_words(self) -> str:
        """The end of what the worker wrote to stderr, as the tail of a sentence."""
        self._log.seek(0)
        words = " ".join(self._log.read().decode(errors="replace").split())[-400:]
        return f" ({self.python} {_WORKER.name} {self.model_dir}); its last words: {words or '(none)'}"
