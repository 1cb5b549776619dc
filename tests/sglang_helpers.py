"""Cells, operations and answers for the tests of the SGLang adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_kvcheck.cells import Cell, Features, Model, Position
from pytest_kvcheck.client.control import Answer, Control
from pytest_kvcheck.engines.base import LaunchInputs
from pytest_kvcheck.operations import Operation

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


def cell(engine: Any = "sglang", *, features: Mapping[str, Any] | None = None, **fields: Any) -> Cell:
    return Cell(
        name="c",
        family="llama",
        engine=engine,
        model=Model("m"),
        features=Features(**(features or {})),
        at=Position("m.yaml", 1, 1),
        **fields,
    )


def inputs(of: Cell, device: Any = "cpu", model: str = "org/model") -> LaunchInputs:
    return LaunchInputs(of, 30123, "/venv/bin/python", device, model, "draft", Path("scratch"))


def operation(kind: Any = "generate", **fields: Any) -> Operation:
    return Operation(**{"id": 1, "kind": kind, "input_ids": (5, 6, 7), "max_new_tokens": 2, **fields})


def event(ids: list[int], finish: Any = None, **meta: Any) -> dict[str, Any]:
    """One event or body as SGLang sends it."""
    counts = {"prompt_tokens": 3, "completion_tokens": len(ids), "cached_tokens": 0, "num_retractions": 0}
    return {"output_ids": ids, "meta_info": {"id": "r", "finish_reason": finish, **counts, **meta}}


def pairs(ids: list[int], first: float | None = -0.5) -> list[list[Any]]:
    """Log-prob entries of these tokens."""
    return [[first if place == 0 else -0.5 - place, token, None] for place, token in enumerate(ids)]


LENGTH = {"type": "length", "length": 2}


class FakeControl(Control):
    """Answers from a table of paths (without their query); a path that is not there answers 404."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.answers = dict(answers)
        self.asked: list[str] = []

    def call(self, method: str, path: str, json: Any = None, timeout: float | None = None) -> Answer:
        self.asked.append(path)
        answer = self.answers.get(path.partition("?")[0], Answer(404, "{}"))
        return answer if isinstance(answer, Answer) else Answer(200, _text(answer))


def _text(body: Any) -> str:
    return body if isinstance(body, str) else json.dumps(body)


def loads(**rank: int) -> dict[str, Any]:
    base = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 2048}
    return {"loads": [{**base, **rank}]}
