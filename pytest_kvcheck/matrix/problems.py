"""What is wrong with a matrix: every problem of a file, each with its place and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_kvcheck.cells import Position


@dataclass(frozen=True, slots=True)
class MatrixProblem:
    """One thing that is wrong: what was expected, what was found, where; ``hint`` is what to do about it."""

    at: Position
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.at}: expected {self.expected}, found {self.found}{hint}"


class MatrixError(Exception):
    """A matrix that cannot be run, with every problem that was found in it."""

    def __init__(self, errors: Iterable[MatrixProblem]) -> None:
        self.errors: list[MatrixProblem] = list(errors)
        super().__init__(str(self))

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.errors)


def describe(value: Any) -> str:
    """A value as a person would call it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"'{value if len(value) <= 60 else value[:57] + '...'}'"
        case dict():
            return "a map"
        case list():
            return "a list"
        case _:
            text = str(value)
            return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, valid: Iterable[str]) -> str:
    """``did you mean 'page_size'?`` where one of the valid names is near, else an empty string."""
    by_form = {name.lower().replace("-", "_"): name for name in valid}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), by_form, n=1, cutoff=0.6)
    return f"did you mean '{by_form[close[0]]}'?" if close else ""


def one_of(names: Sequence[str]) -> str:
    """``'a', 'b' or 'c'``."""
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]
