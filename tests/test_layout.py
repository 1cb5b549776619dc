"""The import rule of ARCHITECTURE.md: a module imports only from layers below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pytest_kvcheck"

# Highest first. Names on one line are one layer: they import each other only inside one folder.
LAYERS: list[tuple[str, ...]] = [
    (
        *("plugin", "cli", "items", "session", "doctor", "progress", "scheduling"),
        *("reach", "measure", "mutants", "detection"),
    ),
    ("fixtures", "shrink", "compare"),
    ("judge", "casefiles", "examine", "independent", "rest", "settings", "reach"),
    ("launch",),
    ("workloads", "engines"),
    ("client", "oracles"),
    ("report", "matrix"),
    ("observe",),
    ("trace", "ledger", "operations", "findings", "cells"),
]
# The plugin's own modules form one layer, and plain data may build on plain data.
TOGETHER = (LAYERS[0], LAYERS[2], LAYERS[-1])


def layer_of(unit: str) -> int:
    return next(at for at, layer in enumerate(LAYERS) if unit in layer)


def imported_units(path: Path) -> set[str]:
    units: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "pytest_kvcheck":
                names = [f"pytest_kvcheck.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "pytest_kvcheck" and len(parts) > 1 and not parts[1].startswith("__"):
                units.add(parts[1])
    return units


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "stub" not in path.parts]


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_layers_below(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        assert not imported_units(path)
        return
    found = imported_units(path) - {unit}
    if unit == "reference":
        assert not found, f"reference/ must stand alone, found imports of {found}"
        return
    assert "reference" not in found, "nothing may import reference/: it is another process"
    mine = layer_of(unit)
    for other in found:
        theirs = layer_of(other)
        together = any(unit in layer and other in layer for layer in TOGETHER)
        assert theirs > mine or together, f"{unit} (layer {mine}) imports {other} (layer {theirs})"


def test_the_rule_would_notice_a_breach() -> None:
    assert (
        layer_of("trace") > layer_of("observe") > layer_of("oracles") > layer_of("launch") > layer_of("judge")
    )
    assert imported_units(PACKAGE / "ledger.py") == {"trace"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_holds_more_than_one_concern(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 420
