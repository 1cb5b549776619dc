"""Which worker of pytest-xdist gets a case: with ``--dist loadgroup``, all of one launch key go to one.

A worker's marker xdist_group would say the same, but the controller knows node ids only, and pytest-xdist 3.8
writes the group into a field that pytest 9.2 no longer reads. So the controller looks the cells up itself.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

from pytest_kvcheck.items import load_cells
from pytest_kvcheck.matrix.loader import MatrixError


class LaunchKeyScheduling(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Groups the cases of a matrix by launch key, and everything else as xdist does."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._keys_of = functools.cache(self._keys)

    def _split_scope(self, nodeid: str) -> str:
        path, _, names = nodeid.partition("::")
        cell = names.partition("::")[0]
        if not path.endswith((".yaml", ".yml")) or not cell:
            return str(super()._split_scope(nodeid))
        return self._keys_of(path).get(cell, f"{path}::{cell}")

    def _keys(self, path: str) -> dict[str, str]:
        try:
            cells = load_cells(self.config.rootpath / path, self.config)
        except MatrixError:
            return {}
        return {cell.name: cell.launch_key for cell in cells}
