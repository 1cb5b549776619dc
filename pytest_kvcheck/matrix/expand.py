"""Axes, include and exclude: which combinations of cell and values there are, and what settings each has.

The rules are those of GitHub Actions, with the base cells as one more axis called ``cell``:

- every base cell is combined with every value of every axis; a cell that sets a key is not spread along it;
- ``exclude`` drops the combinations that have all the values of an entry;
- an ``include`` entry is added to every original combination none of whose values it would change; an entry
  that fits none makes a new one. (A ``name`` would change a combination's name, so it makes a new one.)

Of two settings the more special wins: top of the file, ``defaults``, ``engines``, cell, axis, ``include``, and
the cell's own ``engines``. The maps ``args``, ``env``, ``retract`` and ``speculative`` are merged key by key,
and null takes a key away; everything else is replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]

FREE_MAPS = ("args", "env")
_MERGED = (*FREE_MAPS, "retract", "speculative")
# Keys that say which combination is meant, not how its server is set.
_NAMING = ("name", "cell")


@dataclass(frozen=True, slots=True)
class Layer:
    """Some settings and the place in the file of each."""

    values: Mapping[str, Any]
    paths: Mapping[str, KeyPath]

    @classmethod
    def at(cls, path: KeyPath, values: Mapping[str, Any]) -> Layer:
        """The settings of the map that stands at a path."""
        own = {key: value for key, value in values.items() if key not in _NAMING}
        return cls(own, {key: (*path, key) for key in own})


@dataclass(slots=True)
class Combination:
    """A cell to be: its name, its layers from the most general to the most special, and its place.

    ``chosen`` holds the base cell's name and the value on every axis: what include and exclude look at.
    """

    name: str
    path: KeyPath
    chosen: dict[str, Any]
    layers: list[Layer] = field(default_factory=list)


@dataclass(slots=True)
class Settings:
    """Merged settings; ``paths`` says where in the file each came from."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)

    def add(self, layer: Layer) -> None:
        """Put more special settings over these."""
        for key, value in layer.values.items():
            old = self.values.get(key)
            if key in _MERGED and isinstance(value, Mapping) and isinstance(old, Mapping):
                value = {**old, **value}
            self.values[key] = value
            self.paths[key] = layer.paths[key]


def label(value: Any) -> str:
    """An axis value as a part of a cell's name: no spaces, slashes or brackets."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case Mapping():
            return ",".join(f"{key}:{label(item)}" for key, item in value.items())
        case _:
            return str(value)


def _suffix(values: Mapping[str, Any]) -> str:
    return "-".join(f"{key}={label(value)}" for key, value in values.items())


def _named(base: str | None, values: Mapping[str, Any]) -> str:
    return "-".join(part for part in (base, _suffix(values)) if part)


def _product(form: Mapping[str, Any]) -> list[Combination]:
    axes: Mapping[str, list[Any]] = form.get("axes", {})
    cells: Mapping[str, Any] = form.get("cells", {})
    found = []
    for cell, own in cells.items() if cells else [(None, {})]:
        path: KeyPath = ("cells", cell) if cell is not None else ("axes",)
        free = [axis for axis in axes if axis not in own]
        pinned = {axis: own[axis] for axis in axes if axis in own}
        for indices in itertools.product(*(range(len(axes[axis])) for axis in free)):
            values = {axis: axes[axis][index] for axis, index in zip(free, indices, strict=True)}
            origin: dict[str, KeyPath] = {
                axis: ("axes", axis, index) for axis, index in zip(free, indices, strict=True)
            }
            if cell is None and not values:
                continue
            layers = [Layer.at(path, own), Layer(values, origin)]
            found.append(Combination(_named(cell, values), path, {"cell": cell, **pinned, **values}, layers))
    return found


def _excluded(chosen: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return bool(entry) and all(key in chosen and chosen[key] == value for key, value in entry.items())


def combinations(form: Mapping[str, Any]) -> list[Combination]:
    """The combinations of a validated matrix (given settings only, long forms), in the order of the file."""
    kept = [c for c in _product(form) if not any(_excluded(c.chosen, e) for e in form.get("exclude", []))]
    original = list(kept)
    for index, entry in enumerate(form.get("include", [])):
        path: KeyPath = ("include", index)
        layer = Layer.at(path, entry)
        given = {key: value for key, value in entry.items() if key != "name"}
        fits = [
            combination
            for combination in original
            if "name" not in entry
            and all(combination.chosen[key] == given[key] for key in given if key in combination.chosen)
        ]
        for combination in fits:
            combination.layers.append(layer)
        if not fits:
            base = entry.get("cell")
            own = form.get("cells", {}).get(base, {})
            axes = {key: value for key, value in layer.values.items() if key in form.get("axes", {})}
            name = entry.get("name") or _named(base, axes or layer.values)
            layers = [Layer.at(("cells", base), own)] if base is not None else []
            kept.append(Combination(name, path, {"cell": base, **layer.values}, [*layers, layer]))
    return kept


def merge(form: Mapping[str, Any], combination: Combination, engine: str) -> Settings:
    """All settings of one combination for one engine."""
    settings = Settings()

    def add_engine(path: KeyPath, engines: Mapping[str, Any]) -> None:
        overlay = engines.get(engine, {})
        raw = {key: value for key, value in overlay.items() if key != "features"}
        settings.add(Layer.at((*path, engine), raw))
        settings.add(Layer.at((*path, engine, "features"), overlay.get("features", {})))

    top = {key: form[key] for key in ("model", "command", "workloads") if key in form}
    settings.add(Layer.at((), top))
    settings.add(Layer.at(("defaults",), form.get("defaults", {})))
    add_engine(("engines",), form.get("engines", {}))
    add_engine(("defaults", "engines"), form.get("defaults", {}).get("engines", {}))
    for layer in combination.layers:
        settings.add(layer)
    for layer in combination.layers:
        if "engines" in layer.values:
            add_engine(layer.paths["engines"], layer.values["engines"])
    settings.values.pop("engines", None)
    for key in FREE_MAPS:
        given = settings.values.get(key, {})
        settings.values[key] = {name: value for name, value in given.items() if value is not None}
    return settings
