"""Checking a matrix against its form: pydantic's verdicts in the words and places of the file."""

from __future__ import annotations

import copy
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pytest_kvcheck.matrix.document import Document, KeyPath, Report
from pytest_kvcheck.matrix.problems import MatrixProblem, describe, nearest, one_of
from pytest_kvcheck.matrix.schema import VERSION, MatrixForm

# pydantic's error type -> what to say was expected, with the fields of the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "date_type": "a date such as 2027-03-31",
    "dict_type": "a map",
    "model_type": "a map",
    "list_type": "a list",
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "a list with at least {min_length} entry",
    "string_pattern_mismatch": "a fault kind from 'K01' to 'K25'",
    "value_error": "{error}",
}


_GONE: Any = object()
# Taking a wrong value out can leave a list too short, and so on. All that is wrong stands in the first round.
_ROUNDS = 4


def _inner(annotation: Any) -> Any:
    """An annotation without ``Annotated`` and without its ``None`` alternative."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    alternatives = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (list, dict) or not alternatives or len(alternatives) > 1:
        return annotation
    return _inner(alternatives[0])


def _keys_at(path: KeyPath) -> list[str]:
    """The keys that the form has at a path."""
    here: Any = MatrixForm
    for step in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[str(step)].annotation
        elif get_origin(here) in (list, dict):
            here = get_args(here)[-1]
        here = _inner(here)
    return list(here.model_fields)


def _problem(document: Document, error: ErrorDetails) -> MatrixProblem:
    path, kind, value = error["loc"], error["type"], error["input"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        name, keys = str(path[-1]), _keys_at(path[:-1])
        hint = nearest(name, keys) or f"the keys here are {', '.join(keys)}"
        return MatrixProblem(document.where(path, key=True), "a known key", f"'{name}'", hint)
    if kind == "missing":
        return MatrixProblem(document.where(path[:-1]), f"the key '{path[-1]}'", "none")
    is_key = path[-1] == "[key]"
    where = document.where(path[:-1], key=True) if is_key else document.where(path)
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", context["expected"])
        hint = nearest(value, valid) if isinstance(value, str) else ""
        return MatrixProblem(where, one_of(valid), describe(value), hint)
    expected = _EXPECTED.get(kind, kind.replace("_", " ")).format(**context)
    return MatrixProblem(where, expected, describe(value))


def _prune(data: Any, path: KeyPath) -> None:
    """Take the value at a path out of the data; a step that the data does not have is passed over."""
    holder: Any = None
    last: Any = None
    for step in path:
        in_map = isinstance(data, dict) and step in data
        if in_map or (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            holder, last, data = data, step, data[step]
    if isinstance(holder, dict):
        del holder[last]
    elif isinstance(holder, list):
        holder[last] = _GONE  # its place stays, so that other paths stay right


def _left(value: Any, path: KeyPath, document: Document) -> Any:
    """The data without what is gone; ``document`` learns which entries of each list are left."""
    if isinstance(value, dict):
        return {key: _left(item, (*path, key), document) for key, item in value.items()}
    if isinstance(value, list):
        document.kept[path] = [index for index, item in enumerate(value) if item is not _GONE]
        return [_left(value[index], (*path, index), document) for index in document.kept[path]]
    return value


def validated(document: Document, report: Report) -> dict[str, Any]:
    """The given settings in their long forms. What the form refuses is reported and taken out, so that the
    rest can be checked further.
    """
    marked = copy.deepcopy(document.data)
    for attempt in range(_ROUNDS):
        try:
            return MatrixForm.model_validate(_left(marked, (), document)).model_dump(exclude_unset=True)
        except ValidationError as error:
            details = error.errors(include_url=False)
        if attempt == 0:
            for detail in details:
                report(_problem(document, detail))
        for detail in details:
            # A key that is missing cannot be taken out: what should hold it goes.
            path = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]
            _prune(marked, document.original(path))
    return {}


def check_version(document: Document, report: Report) -> None:
    """Report a format version that this release does not read."""
    version = document.data.get("kvcheck")
    if version == VERSION and not isinstance(version, bool):
        return
    found = describe(version) if "kvcheck" in document.data else "no such key"
    hint = "later versions need a later pytest-kvcheck" if isinstance(version, int) and version > 1 else ""
    expected = f"'kvcheck: {VERSION}', the version of the format"
    report(MatrixProblem(document.where(("kvcheck",)), expected, found, hint))
