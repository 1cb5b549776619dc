"""Engine adapters, made by name. An adapter's module is imported only when its engine is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvcheck.engines.base import Engine


def make_engine(name: str) -> Engine:
    """A fresh adapter for one server. Raises ``ValueError`` for a name that is no engine."""
    if name == "reference":
        from pytest_kvcheck.engines.reference import ReferenceEngine

        return ReferenceEngine()
    if name == "sglang":
        from pytest_kvcheck.engines.sglang import SglangEngine

        return SglangEngine()
    if name == "vllm":
        from pytest_kvcheck.engines.vllm import VllmEngine

        return VllmEngine()
    raise ValueError(f"engine: expected reference, sglang or vllm, found {name!r}")
