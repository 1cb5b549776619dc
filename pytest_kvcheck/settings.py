"""What the command line and the ini file say, checked once and in one place."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from pytest_kvcheck.cells import DeviceName, EngineName


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run. ``budget`` is in seconds of load a case, ``patience`` in
    seconds of one request; ``shard`` is (index from 0, count); ``scorer`` is "transformers" or
    "transformers=PYTHON"."""

    engine: EngineName | None = None
    url: str | None = None
    python: str | None = None
    device: DeviceName = "cpu"
    seed: int = 0
    repeat: int = 1
    budget: float | None = None
    patience: float | None = None
    gpus: str = "auto"
    artifacts: Path = Path(".kvcheck")
    report: Path | None = None
    json: Path | None = None
    shard: tuple[int, int] | None = None
    plant: tuple[str, ...] = ()
    silent: bool = False
    scorer: str | None = None
    shrink: bool = False


def from_config(config: pytest.Config) -> Settings:
    """The settings of a pytest run. Raises ``pytest.UsageError`` that names the option at fault."""
    start = Path(config.invocation_params.dir)

    def value(name: str) -> str | None:
        given = getattr(config.option, f"kvcheck_{name}", None)
        if given is None and name in _INI:
            given = config.getini(f"kvcheck_{name}") or None
        return None if given is None else str(given)

    def number(name: str, least: float) -> float | None:
        text = value(name)
        if text is None:
            return None
        try:
            result = float(text)
        except ValueError:
            result = least - 1
        if result < least:
            raise pytest.UsageError(
                f"--kvcheck-{name}: expected a number of at least {least:g}, found {text!r}"
            )
        return result

    engine, device = value("engine"), value("device") or "cpu"
    if engine is not None and engine not in ("reference", "sglang", "vllm"):
        raise pytest.UsageError(
            f"kvcheck_engine in the ini file: expected reference, sglang or vllm, found {engine!r}"
        )
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"kvcheck_device in the ini file: expected cpu or cuda, found {device!r}")
    url = value("url")
    if url is not None:
        from pytest_kvcheck.client.control import check_url

        try:
            url = check_url(url)
        except ValueError as error:
            raise pytest.UsageError(f"--kvcheck-url: {error}") from None
    path = value("python")
    report, json = value("report"), value("json")
    try:
        scorer = scorer_of(value("scorer"), start)
    except ValueError as error:
        raise pytest.UsageError(f"--kvcheck-{error}") from None
    return Settings(
        engine=cast("EngineName | None", engine),
        url=url,
        python=str(start / Path(path).expanduser()) if path and "/" in path else path,
        device=cast("DeviceName", device),
        seed=int(number("seed", 0) or 0),
        repeat=int(number("repeat", 1) or 1),
        budget=number("budget", 1),
        patience=number("patience", 1),
        gpus=value("gpus") or "auto",
        artifacts=start / (value("artifacts") or ".kvcheck"),
        report=start / report if report else None,
        json=start / json if json else None,
        shard=_shard(value("shard")),
        plant=tuple(config.option.kvcheck_plant),
        silent=bool(config.option.kvcheck_silent),
        shrink=bool(config.option.kvcheck_shrink),
        scorer=scorer,
    )


_INI = ("engine", "python", "device", "seed", "budget", "patience", "gpus", "artifacts", "scorer")


def scorer_of(text: str | None, start: Path) -> str | None:
    """What ``--kvcheck-scorer`` says, its interpreter made absolute. Raises ``ValueError``."""
    if text is None:
        return None
    name, given, path = text.partition("=")
    if name != "transformers" or (given and not path):
        raise ValueError(f"scorer: expected transformers or transformers=PYTHON, found {text!r}")
    python = str(start / Path(path).expanduser()) if "/" in path else shutil.which(path) if path else ""
    if path and not (python and os.access(python, os.X_OK)):
        raise ValueError(f"scorer: expected an interpreter behind transformers=, found {path!r}")
    return f"transformers={python}" if path else name


def check_writable(settings: Settings) -> None:
    """Make the folders that results go to, so that no run is lost for want of one.

    Raises ``pytest.UsageError`` that names the option.
    """
    wanted = {
        "artifacts": settings.artifacts,
        "report": settings.report and settings.report.parent,
        "json": settings.json and settings.json.parent,
    }
    for name, folder in wanted.items():
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = "" if os.access(folder, os.W_OK) else "one that may not be written to"
        except OSError as error:
            found = (error.strerror or str(error)).lower()
        if found:
            raise pytest.UsageError(f"--kvcheck-{name}: expected a folder to write to, found {found}: {folder}")


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, _, count = text.partition("/")
    if index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count):
        return int(index) - 1, int(count)
    raise pytest.UsageError(f"--kvcheck-shard: expected I/N with 1 <= I <= N, for example 1/4, found {text!r}")
