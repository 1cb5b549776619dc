"""Accounting lines of the installed SGLang, broken one at a time: each must be found, and named.

With the engine's own checks on and off. Off, nothing but what a client can see is left to find it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from real_engine_helpers import DEVICE, MUTANTS, run_sglang

_spec = importlib.util.spec_from_file_location("kvcheck_mutants", MUTANTS / "kvcheck_mutants.py")
assert _spec is not None
assert _spec.loader is not None
mutants: Any = importlib.util.module_from_spec(_spec)
sys.modules["kvcheck_mutants"] = mutants
_spec.loader.exec_module(mutants)

# Mutant -> the workload whose traffic reaches the changed line, and every kind that names the fault rightly:
# a lost slot may be told by who lost it (K01, K03, K05, K09) or by what still holds it (K10).
CASES: dict[str, tuple[str | dict[str, Any], set[str]]] = {
    "session-release-frees-nothing": ("kv-inheritance", {"K01", "K09"}),
    "session-row-kept": ("kv-inheritance", {"K11"}),
    "session-lock-kept": ("kv-inheritance", {"K10", "K01", "K09"}),
    "tail-free-nothing": ("stress-concurrent", {"K01", "K05"}),
    "abort-release-forgotten": ("nth-mid-abort", {"K01", "K03"}),
    "retract-release-forgotten": ("stress-concurrent", {"K01", "K05"}),
    "double-free": ("kv-inheritance", {"K12"}),
    "aborted-turn-kept": ("nth-mid-abort", {"K06"}),
    "in-flight-flag-kept": ("nth-mid-abort", {"K07"}),
    "close-in-flight-forgets": ("close-in-flight", {"K09", "K01"}),
    "abort-ignored": ("nth-mid-abort", {"K04", "K03"}),
    "stale-kv": ({"logprob-concurrent": {"rounds": 1}}, {"K13", "K17", "K18"}),
    "neighbours-logprob": ({"logprob-concurrent": {"rounds": 1}}, {"K18", "K13"}),
    "cached-tokens-short": ("kv-inheritance", {"K19", "K02", "K25"}),
    "overshoot-untrimmed": ("stress-concurrent", {"K01", "K02"}),
}
# The fault breaks what the strict checks count, so that a strict server ends; both ways are run for these.
BOTH_WAYS = (
    "session-release-frees-nothing",
    "session-row-kept",
    "session-lock-kept",
    "tail-free-nothing",
    "abort-release-forgotten",
    "retract-release-forgotten",
)
# Without the strict checks this still ends the server, by an assertion of its gauges: nobody is left to ask.
DIES_ANYWAY = ("double-free",)


def features(mutant: Any, strict: bool) -> dict[str, Any]:
    wanted: dict[str, Any] = {"strict": strict}
    if mutant.feature == "retract":
        wanted["retract"] = {"interval": 3}
    if mutant.feature == "speculative":
        wanted["speculative"] = {"overlap": DEVICE != "cpu"}
    return wanted


def test_every_mutant_has_a_case() -> None:
    assert set(CASES) == set(mutants.BY_NAME)


@pytest.mark.real_engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strict"),
    [
        pytest.param(name, strict, marks=[] if name in BOTH_WAYS else [pytest.mark.nightly])
        for name in CASES
        for strict in (False, True)
        if not strict or name in BOTH_WAYS
    ],
)
def test_a_broken_line_is_found_and_named(tmp_path: Path, name: str, strict: bool) -> None:
    mutant = mutants.BY_NAME[name]
    workload, kinds = CASES[name]
    draft = {"draft": "tiny-llama-eagle"} if mutant.feature == "speculative" else {}
    run = run_sglang(
        tmp_path,
        features(mutant, strict),
        [workload],
        {"KVCHECK_MUTANT": name, "PYTHONPATH": str(MUTANTS)},
        model={"path": "tiny-llama", **draft},
    )
    assert f"kvcheck mutant {name} is in" in run.log, run.output[-4000:]
    (case,) = run.cases
    assert case["outcome"] in ("leak", "mismatch", "stuck"), f"{case['outcome']}: {run.output[-4000:]}"
    found = {finding["kind"] for finding in run.findings}
    assert found & kinds, f"expected one of {kinds}, found {found}: {run.output[-4000:]}"
    if not strict and name not in DIES_ANYWAY:
        others = [one for one in run.findings if one["oracle"] != "engine_log" and one["kind"] in kinds]
        assert others, f"only the engine's own log told: {run.output[-4000:]}"


# --- the mutants themselves, without an engine ---------------------------------------------------------
def test_a_text_that_moved_on_is_an_error() -> None:
    assert mutants.mutate("a\nb\n", "b\n", "c\n") == "a\nc\n"
    for source in ("a\n", "b\nb\n"):
        with pytest.raises(ValueError, match="exactly once"):
            mutants.mutate(source, "b\n", "")


PACKAGE = """
def free(slots, row):
    slots.append(row)
"""


def run_python(tmp_path: Path, release: str, source: str = PACKAGE) -> Any:
    """A Python that builds a mutant into a module of this source and calls it."""
    import subprocess

    (tmp_path / "engine_module.py").write_text(source)
    program = f"""
import sys; sys.path[:0] = [{str(MUTANTS)!r}, {str(tmp_path)!r}]
import kvcheck_mutants as m
edit = ("engine_module", "    slots.append(row)\\n", "    pass\\n")
m.BY_NAME["x"] = m.Mutant("x", "K01", "", "", True, {{"1.0": edit}})
m.install("x", {release!r})
import engine_module
slots = []; engine_module.free(slots, 1); print(slots)
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_a_mutant_is_built_in_while_its_module_is_imported(tmp_path: Path) -> None:
    done = run_python(tmp_path, "1.0")
    assert done.stdout == "[]\n"
    assert "kvcheck mutant x is in engine_module" in done.stderr


@pytest.mark.parametrize(
    ("release", "source", "words"),
    [("2.0", PACKAGE, "is made for SGLang 1.0"), ("1.0", "def free(slots, row): ...\n", "exactly once")],
)
def test_a_mutant_that_does_not_fit_ends_the_process(
    tmp_path: Path, release: str, source: str, words: str
) -> None:
    done = run_python(tmp_path, release, source)
    assert done.returncode == 78
    assert words in done.stderr
    assert done.stdout == ""


def test_an_unknown_mutant_ends_the_process() -> None:
    import subprocess

    program = f"import sys; sys.path.insert(0, {str(MUTANTS)!r}); import kvcheck_mutants as m; m.install('no')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "session-lock-kept" in done.stderr
