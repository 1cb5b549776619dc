"""Cells, operations and a server without sockets for the tests of the vLLM adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_kvcheck.cells import Cell, Features, Model, Position
from pytest_kvcheck.client.control import Answer, Control
from pytest_kvcheck.operations import Operation

METRICS = (Path(__file__).parents[1] / "fixtures" / "golden" / "vllm-0.32.0-metrics.txt").read_text()


def cell(model: str = "/models/llama", draft: str | None = None, **given: Any) -> Cell:
    """A cell of vLLM on a CPU; keywords that are no features go to the cell itself."""
    own = {name: given.pop(name) for name in ("args", "env", "command", "device") if name in given}
    return Cell("c", "llama", "vllm", Model(model, draft), Features(**given), Position("m.yaml", 1, 1), **own)


def operation(kind: str = "generate", **given: Any) -> Operation:
    return Operation(id=1, kind=kind, **{"input_ids": (5, 6, 7), "max_new_tokens": 2, **given})


def event(
    ids: list[int], logprobs: list[Any] | None = None, reason: str | None = None, **more: Any
) -> dict[str, Any]:
    """One event of a stream, or the body of a reply that was not streamed."""
    choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}
    if logprobs is not None:
        tops = [None if one is None else {"token_id:1": one, "token_id:2": one + 1} for one in logprobs]
        choice["logprobs"] = {"token_logprobs": logprobs, "top_logprobs": tops}
    usage = more.pop("usage", None)
    return {"id": "cmpl-r", "choices": [choice | more], **({"usage": usage} if usage else {})}


def usage(prompt: int, completion: int, cached: int | None = 0) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


class FakeVllm(Control):
    """Answers as a server in a given state would; ``asked`` lists the paths that were called."""

    def __init__(self, answer: Callable[[str, str], Answer]) -> None:
        super().__init__("http://127.0.0.1:1")
        self._answer = answer
        self.asked: list[str] = []

    def call(self, method: str, path: str, json: Any = None, timeout: float | None = None) -> Answer:
        self.asked.append(f"{method} {path}")
        return self._answer(method, path)


def metrics(used: float = 0.0, running: int = 0, waiting: int = 0, preempted: int = 0) -> str:
    """The real text with other values. ``used`` is the share of the pool's 64 usable blocks."""
    values = {
        "kv_cache_usage_perc": used,
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "num_preemptions_total": preempted,
    }
    lines = []
    for line in METRICS.splitlines():
        name = line.removeprefix("vllm:").split("{")[0]
        lines.append(f"{line.rsplit(' ', 1)[0]} {values[name]}" if name in values else line)
    return "\n".join(lines) + "\n"


def answers(text: str, reset: Answer | None = None) -> Callable[[str, str], Answer]:
    """A server whose metrics never change and whose leak probe answers ``reset``."""
    probe = reset or Answer(200, json.dumps({"success": True}))
    return lambda method, path: Answer(200, text) if path == "/metrics" else probe
