"""The plugin's hooks for a session with a matrix: order, servers, results, summary.

It is registered only when a matrix was named. Under pytest-xdist every worker has one (it runs cases) and the
controller has one (it gathers results, draws the table and writes the files).
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvcheck import __version__, settings
from pytest_kvcheck.items import KvItem, check_plants
from pytest_kvcheck.matrix.loader import SUFFIXES, is_matrix_file
from pytest_kvcheck.progress import ProgressReader, ProgressWriter, Screen
from pytest_kvcheck.report.results import CaseResult

PROGRESS = "progress.log"


class KvSession:
    """One a process. ``results`` is filled on the process that reports: the controller, or the only one."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings = settings.from_config(config)
        check_plants(self.settings)
        settings.check_writable(self.settings)
        self.results: dict[str, CaseResult] = {}
        self.upcoming: pytest.Item | None = None
        self._bench: Any = None
        self._progress: ProgressWriter | None = None
        self._reader: ProgressReader | None = None
        self._screen: Screen | None = None
        # One bad matrix must not cost the results of the others.
        config.option.continue_on_collection_errors = True

    @property
    def is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    def pytest_sessionstart(self) -> None:
        """The process that reports shows what happens in all of them, unless asked to be quiet."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if not self.is_worker and reporter is not None and self.config.get_verbosity() >= 0:
            self._screen = Screen(reporter)
            self._reader = ProgressReader(self.settings.artifacts / PROGRESS, self._screen.show)

    # --- order -----------------------------------------------------------------------------------
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Cases of one launch key stand together, keys with the most cases first; then the shard is cut."""
        mine = [item for item in items if isinstance(item, KvItem)]
        groups: dict[str, list[KvItem]] = {}
        for item in mine:
            groups.setdefault(item.case.cell.launch_key, []).append(item)
        ordered = sorted(groups.values(), key=len, reverse=True)
        if self.settings.shard is not None:
            index, count = self.settings.shard
            dropped = [item for at, group in enumerate(ordered) if at % count != index for item in group]
            ordered = ordered[index::count]
            if dropped:
                config.hook.pytest_deselected(items=dropped)
        others = [item for item in items if not isinstance(item, KvItem)]
        items[:] = others + [item for group in ordered for item in group]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """With ``--dist loadgroup``, the cases of one launch key stay on one worker."""
        if config.getvalue("dist") != "loadgroup":
            return None
        from pytest_kvcheck.scheduling import LaunchKeyScheduling

        return LaunchKeyScheduling(config, log)

    # --- running ---------------------------------------------------------------------------------
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self.upcoming = nextitem
        return (yield)

    def run(self, item: KvItem) -> CaseResult:
        """Run one case on the server of its launch key; the server stops with its last case."""
        following = self.upcoming
        key = item.case.cell.launch_key
        last = not (isinstance(following, KvItem) and following.case.cell.launch_key == key)
        from pytest_kvcheck.shrink.kept import run_case

        return run_case(self.bench(), item.case, item.nodeid, last=last)

    def bench(self) -> Any:
        """What launches servers and judges cases in this process."""
        if self._bench is None:
            from pytest_kvcheck.judge import Bench

            who = f"[{self.config.workerinput['workerid']}] " if self.is_worker else ""  # type: ignore[attr-defined]
            self._progress = ProgressWriter(self.settings.artifacts / PROGRESS, who)
            self._bench = Bench(self.settings, self._progress)
        return self._bench

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if isinstance(item, KvItem) and item.result is not None and call.when == "call":
            # Builtins only: xdist carries a report's attributes as JSON-like data.
            report.kvcheck = msgspec.to_builtins(item.result)  # type: ignore[attr-defined]
        return report

    # --- results ---------------------------------------------------------------------------------
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        found: dict[str, Any] | None = getattr(report, "kvcheck", None)
        if found is None or not report.failed:
            return None
        word = str(found["outcome"]).upper()
        return "failed", word[0], word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        found: dict[str, Any] | None = getattr(report, "kvcheck", None)
        if found is not None:
            result = msgspec.convert(found, CaseResult)
            self.results[result.id] = result
        elif report.failed and ".yaml::" in report.nodeid:
            # A worker died, or set-up or teardown failed: the case must not vanish from the results.
            case_id = report.nodeid
            self.results.setdefault(case_id, CaseResult.failed_to_run(case_id, report.longreprtext))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not self.is_worker and report.failed and report.nodeid.endswith((".yaml", ".yml")):
            self.results[report.nodeid] = CaseResult.failed_to_run(report.nodeid, report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.close()
        if self.is_worker:
            return
        outcomes = {result.outcome for result in self.results.values()}
        if self.settings.url is not None and outcomes == {"skipped"} and session.exitstatus == 0:
            # The server fits no cell: that must not look like a good run.
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        from pytest_kvcheck.report.results import write_json

        results = list(self.results.values())
        if self.settings.json is not None:
            write_json(self.settings.json, results)
        if self.settings.report is not None:
            from pytest_kvcheck.report.html import write_html

            write_html(self.settings.report, results, self.settings.artifacts)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.results:
            return
        from pytest_kvcheck.report.terminal import render

        writer = terminalreporter._tw
        terminalreporter.section("kvcheck")
        terminalreporter.write_line(
            render(
                list(self.results.values()),
                width=writer.fullwidth,
                color=writer.hasmarkup,
                told=self.config.option.tbstyle != "no",
            )
        )
        for name in ("json", "report"):
            path = getattr(self.settings, name)
            if path is not None:
                terminalreporter.write_line(f"{name}: {path}")

    def pytest_report_header(self) -> list[str]:
        chosen = self.settings
        python = chosen.python or "this Python"
        parts = [
            f"engine {chosen.engine}" if chosen.engine else "the engine that each matrix names",
            f"attached to {chosen.url}" if chosen.url else f"on {chosen.device}, started with {python}",
            *(f"with the planted fault {fault}" for fault in chosen.plant),
            *(["its own checks off"] if chosen.silent else []),
            f"seed {chosen.seed}",
        ]
        artifacts = os.path.relpath(chosen.artifacts, self.config.invocation_params.dir)
        lines = [f"kvcheck {__version__}: {', '.join(parts)}", f"kvcheck artifacts: {artifacts}"]
        if self.config.getoption("numprocesses", None) and self.config.getoption("dist", "") == "load":
            lines.append("kvcheck: with --dist loadgroup, each server would start on one worker only")
        named = {argument.split("::", 1)[0] for argument in self.config.args}
        for path in (Path(self.config.invocation_params.dir, name) for name in sorted(named)):
            if path.suffix in SUFFIXES and path.is_file() and not is_matrix_file(path):
                lines.append(f"kvcheck: {path.name} is no matrix: its first key is not `kvcheck`")
        return lines

    def pytest_unconfigure(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop every server of this process."""
        if self._bench is not None:
            self._bench.close()
            self._bench = None
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._screen is not None:
            self._screen.close()
            self._screen = None
