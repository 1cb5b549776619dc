"""A YAML file as plain data with the position of every value: YAML 1.2, one document, each key once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.reader import ReaderError

from pytest_kvcheck.cells import Position
from pytest_kvcheck.matrix.problems import MatrixError, MatrixProblem, describe

# A key or an index at each step, from the top of the file.
KeyPath = tuple[str | int, ...]
Report = Callable[[MatrixProblem], None]

# Aliases let a small file stand for a huge one; no matrix comes near this.
_MOST_VALUES = 100_000


def _position(file: str, node: Node) -> Position:
    return Position(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _children(node: Node, seen: frozenset[int] = frozenset()) -> Iterator[tuple[Node, str | int, Node]]:
    """(key node, key, value node) of a map or list; a map's own keys come before those it merges (``<<``)."""
    if isinstance(node, SequenceNode):
        yield from ((item, index, item) for index, item in enumerate(node.value))
    elif isinstance(node, MappingNode) and id(node) not in seen:
        merged: list[Node] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or key.value == "<<":
                merged += value.value if isinstance(value, SequenceNode) else [value]
            else:
                yield key, key.value if isinstance(key.value, str) else "", value
        for base in merged:
            yield from _children(base, seen | {id(node)})


@dataclass(frozen=True, slots=True)
class Document:
    """A file's data and where each part of it stands.

    ``kept`` is for lists that lost wrong entries: list -> the original index of each entry that is left. Paths
    are those of the data without the lost entries.
    """

    file: str
    data: dict[str, Any]
    root: Node
    kept: dict[KeyPath, list[int]] = field(default_factory=dict)

    def original(self, path: Sequence[str | int]) -> KeyPath:
        """A path in the data as it stood in the file."""
        result: KeyPath = ()
        for step in path:
            if isinstance(step, int) and result in self.kept:
                step = self.kept[result][step]
            result = (*result, step)
        return result

    def where(self, path: Sequence[str | int], *, key: bool = False) -> Position:
        """The position of the value (or its key) at a path. A step that the file does not have is passed
        over, because short forms (a name for a map, one thing for a list of one) leave steps out.
        """
        key_node = value_node = self.root
        for step in self.original(path):
            for child_key, name, child in _children(value_node):
                if name == step:
                    key_node, value_node = child_key, child
                    break
        return _position(self.file, key_node if key else value_node)


def _duplicates(file: str, root: Node, report: Report) -> None:
    todo, seen = [root], {id(root)}
    while todo:
        node = todo.pop()
        if isinstance(node, MappingNode):
            first: dict[tuple[str, str], Node] = {}
            for key, _ in node.value:
                if not isinstance(key.value, str):
                    continue
                before = first.setdefault((key.tag, key.value), key)
                if before is not key:
                    report(
                        MatrixProblem(
                            _position(file, key),
                            "each key once",
                            f"'{key.value}' a second time",
                            f"it stands first at {_position(file, before)}",
                        )
                    )
        for _, _, child in _children(node):
            if id(child) not in seen:
                seen.add(id(child))
                todo.append(child)


def _plain(document: Document, report: Report) -> dict[str, Any]:
    """The data as maps with text keys, lists and scalars; anything else is reported and left out."""
    left = _MOST_VALUES

    def visit(value: Any, path: KeyPath, above: tuple[int, ...]) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or id(value) in above:
            found = "an alias inside itself" if id(value) in above else f"more than {_MOST_VALUES} values"
            raise MatrixError([MatrixProblem(document.where(path), "a finite configuration", found)])
        if isinstance(value, list):
            inside = (*above, id(value))
            return [visit(item, (*path, index), inside) for index, item in enumerate(value)]
        if isinstance(value, dict):
            inside = (*above, id(value))
            plain = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    where = document.where((*path, str(key)), key=True)
                    hint = f'write "{key}" in quotes if it is a name'
                    report(MatrixProblem(where, "text as a key", describe(key), hint))
                plain[str(key)] = visit(item, (*path, str(key)), inside)
            return plain
        return value

    plain: dict[str, Any] = visit(document.data, (), ())
    return plain


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = True  # reported by _duplicates, all of them, with both positions
    return yaml


def read(path: Path, report: Report) -> Document:
    """Read a matrix file. Faults that leave the rest readable go to ``report``.

    Raises :class:`MatrixError` where nothing can be read: no file, no YAML, not a map.
    """
    # Short where it can be, as editors and CI annotations want it.
    here = Path.cwd()
    file = str(path.relative_to(here) if path.is_relative_to(here) else path)

    def unreadable(expected: str, found: str, line: int = 1, column: int = 1, hint: str = "") -> MatrixError:
        return MatrixError([MatrixProblem(Position(file, line, column), expected, found, hint)])

    try:
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable("a readable matrix file", (error.strerror or str(error)).lower()) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a reused anchor is legal YAML
            root = _yaml().compose(raw)
            data = _yaml().load(raw)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise unreadable("valid YAML", " ".join(what.split()), line, column) from None
    except ReaderError as error:
        before = raw[: error.position].decode(errors="replace")
        line = before.count("\n") + 1
        raise unreadable("valid YAML in UTF-8", error.reason, line, len(before) - before.rfind("\n")) from None
    except (YAMLError, ValueError) as error:
        raise unreadable("valid YAML", " ".join(str(error).split())) from None
    except RecursionError:
        raise unreadable("valid YAML", "values nested too deeply to read") from None
    if root is None or data is None:
        raise unreadable("a matrix that starts with 'kvcheck: 1'", "an empty file")
    where = _position(file, root)
    if not isinstance(data, dict):
        found = describe(data)
        raise unreadable("a map that starts with 'kvcheck: 1'", found, where.line, where.column)
    _duplicates(file, root, report)
    document = Document(file, data, root)
    return Document(file, _plain(document, report), root)
