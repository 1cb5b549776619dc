"""Cells from merged settings: names, models, workloads, and the checks that need several keys at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcheck.cells import (
    ENGINE_NAMES,
    Cell,
    DeviceName,
    EngineName,
    Features,
    Known,
    Model,
    Retract,
    Speculative,
    WorkloadRef,
)
from pytest_kvcheck.matrix.document import Document
from pytest_kvcheck.matrix.expand import KeyPath, Settings, combinations, merge
from pytest_kvcheck.matrix.problems import MatrixProblem, describe, nearest
from pytest_kvcheck.matrix.schema import FeaturesForm

_FEATURES = tuple(FeaturesForm.model_fields)
# A cell's name becomes a part of a pytest id and of a folder's name.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,:-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Algorithms that read a draft model's weights.
_NEEDS_DRAFT = ("EAGLE", "EAGLE3", "STANDALONE")
_RESERVED = "known"


@dataclass(frozen=True, slots=True)
class Context:
    """What cells are built with beside the file's own settings."""

    document: Document
    folder: Path
    device: DeviceName
    workload_names: Mapping[str, frozenset[str]]
    plant: tuple[str, ...]
    silent: bool
    report: Callable[[MatrixProblem], None]

    def problem(self, path: KeyPath, expected: str, found: str, hint: str = "", *, key: bool = False) -> None:
        """Report a problem at a place of the file."""
        self.report(MatrixProblem(self.document.where(path, key=key), expected, found, hint))


def _known(forms: Iterable[Mapping[str, Any]], engine: EngineName) -> tuple[Known, ...]:
    return tuple(
        Known(
            form["kind"],
            form["page"],
            form["until"].isoformat(),
            form.get("sometimes", False),
            form.get("before", ""),
            form.get("text", ""),
        )
        for form in forms
        if form.get("engine") in (None, engine)
    )


def _workloads(
    entries: Iterable[Mapping[str, Any]], path: KeyPath, engine: EngineName, context: Context
) -> tuple[WorkloadRef, ...]:
    refs: dict[str, WorkloadRef] = {}
    for index, entry in enumerate(entries):
        here = (*path, index)
        if len(entry) != 1:
            context.problem(here, "one workload an entry", f"{len(entry)}", "start each with its own '-'")
            continue
        ((name, params),) = entry.items()
        if name == "all":
            refs |= {each: WorkloadRef(each) for each in context.workload_names if each not in refs}
            continue
        if name not in context.workload_names:
            context.problem(
                here, "a workload or 'all'", f"'{name}'", nearest(name, [*context.workload_names, "all"])
            )
            continue
        if name in refs:
            context.problem(here, "each workload once in a cell", f"'{name}' a second time")
        valid = sorted(context.workload_names[name])
        for key, value in params.items():
            at = (*here, name, key)
            if key == _RESERVED:
                continue
            if key not in valid:
                hint = nearest(key, [*valid, _RESERVED]) or f"its parameters are {', '.join(valid) or 'none'}"
                context.problem(at, f"a parameter of '{name}'", f"'{key}'", hint, key=True)
            elif not isinstance(value, bool | int | float | str):
                context.problem(at, "a number, text, true or false", describe(value))
        given = {key: value for key, value in params.items() if key != _RESERVED}
        refs[name] = WorkloadRef(name, given, known=_known(params.get(_RESERVED, []), engine))
    return tuple(refs.values())


def _model_place(text: str, path: KeyPath, context: Context) -> str:
    folder = (context.folder / text).resolve()
    if folder.is_dir():
        return str(folder)
    local = text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text)
    if local:
        near = nearest(folder.name, [each.name for each in folder.parent.glob("*") if each.is_dir()])
        context.problem(
            path,
            "a model folder (relative to this file) or a hub id such as org/name",
            f"no folder '{text}'",
            near,
        )
    return text


def _model(settings: Settings, context: Context) -> Model:
    form = settings.values.get("model")
    if form is None:
        if "model" not in context.document.data:
            context.problem((), "a model, at the top or in every cell: model: {path: ...}", "none")
        return Model("")
    path = settings.paths["model"]
    draft = form.get("draft")
    return Model(
        _model_place(form["path"], (*path, "path"), context),
        _model_place(draft, (*path, "draft"), context) if draft is not None else None,
        form.get("vocab_size"),
    )


def _speculative(form: Mapping[str, Any] | None, path: KeyPath, context: Context) -> Speculative | None:
    if form is None:
        return None
    v1 = form.get("version") == "v1"
    if v1 and form.get("overlap"):
        context.problem((*path, "overlap"), "'overlap: false' with 'version: v1'", "true", "only v2 overlaps")
    return Speculative(**{"overlap": not v1, **form})


def _features(settings: Settings, cell: str, model: Model, context: Context) -> Features:
    given = {key: settings.values[key] for key in _FEATURES if key in settings.values}
    paths = settings.paths
    speculative = _speculative(given.get("speculative"), paths.get("speculative", ()), context)
    retract = given.get("retract")
    given |= {"retract": None if retract is None else Retract(**retract), "speculative": speculative}
    features = Features(**given)
    page, chunk, pool = features.page_size, features.chunked_prefill, features.pool_tokens
    if chunk is not None and chunk % page:
        at = paths.get("chunked_prefill", paths.get("page_size", ()))
        multiple = f"a chunked_prefill that page_size {page} divides"
        context.problem(at, multiple, f"{chunk} in cell '{cell}'", f"the next is {chunk + page - chunk % page}")
    if pool is not None and pool < page:
        at = paths.get("pool_tokens", paths.get("page_size", ()))
        context.problem(at, f"a pool_tokens of at least one page of {page}", f"{pool} in cell '{cell}'")
    if features.mixed_chunk and chunk is None:
        context.problem(paths["mixed_chunk"], "a chunked_prefill beside mixed_chunk", f"none in cell '{cell}'")
    if speculative and speculative.algorithm in _NEEDS_DRAFT and model.path and model.draft is None:
        context.problem(
            paths["speculative"],
            f"a 'draft' in the model for {speculative.algorithm}",
            f"none in cell '{cell}'",
            "give model: {path: ..., draft: ...}",
        )
    return features


def _check_names(form: Mapping[str, Any], context: Context) -> None:
    named: list[tuple[KeyPath, str]] = [(("cells", name), name) for name in form.get("cells", {})]
    included = enumerate(form.get("include", []))
    named += [(("include", index, "name"), entry["name"]) for index, entry in included if "name" in entry]
    for path, name in named:
        if not _NAME.fullmatch(name):
            expected = "a cell name of letters, digits and . _ + = , : - that starts with a letter or digit"
            context.problem(path, expected, describe(name), key=path[0] == "cells")


def _check_references(form: Mapping[str, Any], context: Context) -> None:
    """Names in include and exclude must be known: a typing error would silently do nothing."""
    cells, axes = form.get("cells", {}), form.get("axes", {})
    for section in ("include", "exclude"):
        for index, entry in enumerate(form.get(section, [])):
            base = entry.get("cell")
            if base is not None and base not in cells:
                context.problem(
                    (section, index, "cell"), "the name of a cell", f"'{base}'", nearest(base, cells)
                )
            for key in entry if section == "exclude" else ():
                if key != "cell" and key not in axes:
                    hint = f"the axes are {', '.join(axes) or 'none'}"
                    context.problem((section, index, key), "'cell' or an axis", f"'{key}'", hint, key=True)
            if not entry:
                context.problem((section, index), "at least one key", "an empty entry")


def build_cells(form: Mapping[str, Any], engine: EngineName | None, context: Context) -> list[Cell]:
    """The cells of a validated matrix. Problems go to ``context.report``; a cell with one is still built."""
    _check_names(form, context)
    _check_references(form, context)
    chosen: EngineName = engine or form.get("engine", ENGINE_NAMES[0])
    file = Path(context.document.file)
    cells: dict[str, Cell] = {}
    for combination in combinations(form):
        name, where = combination.name, combination.path
        if name in cells:
            context.problem(
                where, "each cell name once", f"'{name}' a second time", f"first at {cells[name].at}"
            )
            continue
        settings = merge(form, combination, chosen)
        values, paths = settings.values, settings.paths
        model = _model(settings, context)
        features = _features(settings, name, model, context)
        workloads = _workloads(values.get("workloads", []), paths.get("workloads", ()), chosen, context)
        if not values.get("workloads") and "workloads" not in context.document.data:
            context.problem(("workloads",), "workloads, at the top or in every cell", "none")
        command = values.get("command")
        cells[name] = Cell(
            name=name,
            family=form.get("family") or file.stem,
            engine=chosen,
            model=model,
            features=dataclasses.replace(features, strict=False) if context.silent else features,
            at=context.document.where(where, key=True),
            device=context.device,
            args=values["args"],
            env=values["env"],
            command=None if command is None else tuple(command),
            workloads=workloads,
            exercise=values.get("exercise", "required"),
            known=_known(values.get("known", []), chosen),
            plant=context.plant,
            silent=context.silent,
        )
    if not cells and combinations({**form, "exclude": []}):
        context.problem(("exclude",), "at least one cell that is left", "all excluded", key=True)
    elif not cells and not any(context.document.data.get(key) for key in ("cells", "axes", "include")):
        context.problem((), "at least one cell under 'cells' (or 'axes')", "none")
    return list(cells.values())
