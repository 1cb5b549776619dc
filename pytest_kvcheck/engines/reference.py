"""The adapter for the product's own reference engine, which speaks SGLang's protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from pytest_kvcheck import __version__
from pytest_kvcheck.cells import Cell, DeviceName
from pytest_kvcheck.engines.base import LaunchInputs, LaunchSpec
from pytest_kvcheck.engines.environment import package_version
from pytest_kvcheck.engines.sglang import SglangEngine, as_argv
from pytest_kvcheck.observe.logs import LogRule


class ReferenceEngine(SglangEngine):
    """Flags and gauges have SGLang's names; only how it is started and what it lacks differ."""

    name: ClassVar[str] = "reference"

    def unsupported(self, cell: Cell, device: DeviceName, version: str) -> str | None:
        want = cell.features
        if want.tp > 1:
            return f"the reference engine runs one rank, found tp: {want.tp}"
        if want.chunked_prefill and want.chunked_prefill % want.page_size:
            return (
                f"chunked_prefill must be a multiple of page_size, found {want.chunked_prefill} "
                f"and {want.page_size}"
            )
        return None

    def installed_version(self, python: str) -> str:
        """This package's version, if that interpreter has torch to run it with."""
        package_version(python, "torch", "install it with `pip install 'pytest-kvcheck[reference]'`")
        return f"reference-{__version__}"

    def launch_spec(self, inputs: LaunchInputs) -> LaunchSpec:
        cell = inputs.cell
        command = cell.command or (inputs.python, "-m", "pytest_kvcheck.reference")
        overlay = {name.removeprefix("--"): value for name, value in cell.args.items()}
        argv = (*command, *as_argv(self.common_flags(inputs) | overlay), *self._plants(cell))
        # The strict check is read from the environment under SGLang's names, as the retract interval is.
        return LaunchSpec(argv, {**self.common_env(inputs), **cell.env}, ready_deadline=60.0, stop_grace=10.0)

    def log_rules(self) -> Sequence[LogRule]:
        """SGLang's, and the one check that only this engine has. The number tells it from quoted source."""
        text = re.compile(r"KV length error: committed beyond allocated in Holding\(row=\d+")
        return (*super().log_rules(), LogRule("length", text, "leak", "K02"))

    @staticmethod
    def _plants(cell: Cell) -> Sequence[str]:
        planted: list[str] = []
        for fault in cell.plant:
            planted += ["--plant", fault]
        return planted if cell.features.strict else [*planted, "--silent"]
