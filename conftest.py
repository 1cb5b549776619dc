"""Fixtures of our own tests. The plugin itself is loaded through its entry point."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that these tests belong to."""
    return Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of a real engine where its environment is not installed, and say how to install it."""
    for item in items:
        for mark in item.iter_markers("real_engine"):
            name = mark.args[0] if mark.args else "sglang"
            variable = f"KVCHECK_{name.upper()}_PYTHON"
            if not os.environ.get(variable):
                item.add_marker(
                    pytest.mark.skip(
                        reason=f"{variable} is not set: python -m pytest_kvcheck.engines.{name}_cpu.install"
                    )
                )
