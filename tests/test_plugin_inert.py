"""A plain pytest run must not notice the plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "aiohttp", "pydantic", "ruamel", "msgspec", "rich", "jinja2", "psutil", "requests")


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write_probe(folder: Path) -> None:
    folder.joinpath("test_probe.py").write_text(
        "import sys\n"
        "def test_probe(request):\n"
        "    assert request.config.pluginmanager.has_plugin('kvcheck')\n"
        f"    assert [name for name in {HEAVY!r} if name in sys.modules] == []\n"
    )


def test_a_plain_run_imports_nothing_heavy(tmp_path: Path) -> None:
    write_probe(tmp_path)
    # A matrix that lies about in a test folder must not be collected, nor start a server.
    tmp_path.joinpath("stray.yaml").write_text("kvcheck: 1\nfamily: stray\n")
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_probe_would_notice_an_import(tmp_path: Path) -> None:
    write_probe(tmp_path)
    tmp_path.joinpath("conftest.py").write_text("import msgspec\n")
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "msgspec" in done.stdout


def test_switched_off_it_is_clean(tmp_path: Path) -> None:
    tmp_path.joinpath("test_probe.py").write_text("def test_probe():\n    pass\n")
    done = run_pytest(tmp_path, "-p", "no:kvcheck", "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    refused = run_pytest(tmp_path, "-p", "no:kvcheck", "--kvcheck-seed", "1")
    assert "unrecognized arguments: --kvcheck-seed" in refused.stderr


def test_help_names_every_option(tmp_path: Path) -> None:
    shown = run_pytest(tmp_path, "--help").stdout
    for option in (
        "matrix", "engine", "url", "python", "device", "seed", "repeat", "budget", "patience", "gpus",
        "artifacts", "report", "json", "shard", "plant", "silent", "shrink",
    ):  # fmt: skip
        assert f"--kvcheck-{option}" in shown
