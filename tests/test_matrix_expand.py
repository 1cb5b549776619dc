"""From a matrix to cells: axes, include and exclude, precedence, and that two processes get the same."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from pytest_kvcheck.cells import Case, Known, Retract, Speculative, WorkloadRef
from pytest_kvcheck.matrix.expand import combinations, merge
from tests.matrix_helpers import WORKLOADS, cells_of

HEAD = "kvcheck: 1\nmodel: {path: ./tiny, draft: ./tiny}\nworkloads: [kv-inheritance]\n"


def names(form: dict[str, Any]) -> list[str]:
    return [combination.name for combination in combinations(form)]


def test_axes_are_a_cartesian_product_in_the_order_of_the_file() -> None:
    form = {"cells": {"b": {}, "a": {}}, "axes": {"page_size": [16, 1], "retract": [None, {"interval": 3}]}}
    assert names(form) == [
        f"{cell}-page_size={page}-retract={retract}"
        for cell in "ba"
        for page in (16, 1)
        for retract in ("none", "interval:3")
    ]


def test_axes_alone_make_cells() -> None:
    assert names({"axes": {"page_size": [1, 16]}}) == ["page_size=1", "page_size=16"]


def test_a_cell_that_sets_a_key_is_not_spread_along_its_axis() -> None:
    form = {"cells": {"base": {}, "big": {"page_size": 256}}, "axes": {"page_size": [1, 16]}}
    assert names(form) == ["base-page_size=1", "base-page_size=16", "big"]


def test_exclude_needs_all_values_of_an_entry() -> None:
    axes = {"page_size": [1, 16], "max_running": [2, 3]}
    form = {"cells": {"a": {}, "b": {}}, "axes": axes, "exclude": [{"cell": "a", "page_size": 16}]}
    assert [name for name in names(form) if name.startswith("a")] == [
        "a-page_size=1-max_running=2",
        "a-page_size=1-max_running=3",
    ]
    assert sum(name.startswith("b") for name in names(form)) == 4


def test_include_as_in_the_example_of_github_actions() -> None:
    """The documentation's own example (fruit and animal, then colour and shape), in this project's keys."""
    form = {
        "axes": {"page_size": [1, 2], "max_running": [3, 4]},
        "include": [
            {"tp": 5},  # to every combination
            {"tp": 6, "max_running": 3},  # changes what an include added, never what an axis chose
            {"page_size": 1, "context_length": 7},
            {"page_size": 9},  # fits none: a new one, which takes nothing from the other entries
            {"page_size": 9, "max_running": 3},
        ],
    }
    found = {c.name: merge(form, c, "reference").values for c in combinations(form)}
    settings = {
        name: {key: value for key, value in values.items() if key not in ("args", "env")}
        for name, values in found.items()
    }
    assert settings == {
        "page_size=1-max_running=3": {"page_size": 1, "max_running": 3, "tp": 6, "context_length": 7},
        "page_size=1-max_running=4": {"page_size": 1, "max_running": 4, "tp": 5, "context_length": 7},
        "page_size=2-max_running=3": {"page_size": 2, "max_running": 3, "tp": 6},
        "page_size=2-max_running=4": {"page_size": 2, "max_running": 4, "tp": 5},
        "page_size=9": {"page_size": 9},
        "page_size=9-max_running=3": {"page_size": 9, "max_running": 3},
    }


def test_exclude_comes_before_include() -> None:
    form = {
        "axes": {"page_size": [1, 16]},
        "exclude": [{"page_size": 16}],
        "include": [{"page_size": 16, "tp": 2}],
    }
    assert names(form) == ["page_size=1", "page_size=16"]


def test_a_named_include_is_a_new_cell_on_its_base() -> None:
    form = {"cells": {"a": {"tp": 2}}, "include": [{"cell": "a", "name": "a-small", "max_running": 1}]}
    small = combinations(form)[1]
    assert small.name == "a-small"
    assert merge(form, small, "sglang").values == {"tp": 2, "max_running": 1, "args": {}, "env": {}}


def test_the_more_special_setting_wins(tmp_path: Path) -> None:
    text = HEAD + (
        "defaults: {page_size: 2, max_running: 2, tp: 2, context_length: 2048,"
        " args: {a: 1, b: 1, c: 1}, env: {A: 1}, speculative: {steps: 5}}\n"
        "engines: {sglang: {features: {page_size: 4, tp: 4}, args: {b: 2}, env: {B: true}},"
        " vllm: {args: {b: 9}}}\n"
        "cells: {x: {tp: 8, args: {--c: null, d: [1, 2]}, speculative: {topk: 2},"
        " engines: {sglang: {features: {tp: 16}, command: [my, launcher]}}}, y: {speculative: null}}\n"
    )
    x, y = cells_of(tmp_path, text, engine="sglang")
    features = x.features
    assert (features.page_size, features.max_running, features.tp) == (4, 2, 16)
    assert features.speculative == Speculative(steps=5, topk=2)
    assert x.args == {"a": 1, "b": 2, "d": [1, 2]}
    assert x.env == {"A": "1", "B": "true"}
    assert x.command == ("my", "launcher")
    assert (y.features.speculative, y.command) == (None, None)
    (x_vllm, _) = cells_of(tmp_path, text, engine="vllm")
    assert (x_vllm.args["b"], x_vllm.features.page_size, x_vllm.engine) == (9, 2, "vllm")


def test_an_engine_may_bring_its_own_model_and_a_cell_still_wins(tmp_path: Path) -> None:
    text = HEAD + "engines: {vllm: {model: org/other}}\ncells: {a: {}, b: {model: org/cell}}"
    assert [cell.model.path for cell in cells_of(tmp_path, text, engine="vllm")] == ["org/other", "org/cell"]
    assert cells_of(tmp_path, text)[0].model.path == str(tmp_path / "tiny")


def test_v1_never_overlaps(tmp_path: Path) -> None:
    (cell,) = cells_of(tmp_path, HEAD + "cells: {a: {speculative: {version: v1}}}")
    assert cell.features.speculative == Speculative(version="v1", overlap=False)


def test_cells_carry_what_the_file_says(tmp_path: Path) -> None:
    text = """\
        kvcheck: 1
        family: little
        model: {path: meta-llama/Llama-3.1-8B, draft: ./tiny, vocab_size: 128}
        workloads: all
        cells:
          baseline:
          retract:
            retract: {}
            exercise: optional
            known: {kind: K05, page: docs/findings/x.md, until: 2027-01-31}
            workloads:
              - pre-abort
              - kv-inheritance: {turns: 4, known: [{kind: K01, page: y.md, until: 2027-02-01}]}
        """
    baseline, retract = cells_of(tmp_path, text, plant=("retract-tail",), silent=True, device="cuda")
    assert baseline.model.path == "meta-llama/Llama-3.1-8B"
    assert baseline.model.draft == str(tmp_path / "tiny")
    assert baseline.model.vocab_size == 128
    assert [ref.name for ref in baseline.workloads] == list(WORKLOADS)
    assert (baseline.family, baseline.device, baseline.plant) == ("little", "cuda", ("retract-tail",))
    assert not baseline.features.strict
    assert (baseline.at.line, baseline.at.column) == (6, 3)
    assert baseline.at.file == str(tmp_path / "m.yaml")
    assert retract.features.retract == Retract()
    assert retract.exercise == "optional"
    turns = WorkloadRef("kv-inheritance", {"turns": 4}, known=(Known("K01", "y.md", "2027-02-01"),))
    assert retract.workloads == (WorkloadRef("pre-abort"), turns)
    known = Case(retract, turns).known
    assert [(each.kind, each.until) for each in known] == [("K05", "2027-01-31"), ("K01", "2027-02-01")]


def test_a_family_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    assert cells_of(tmp_path, HEAD + "cells: {a: {}}")[0].family == "m"


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    a, b = cells_of(tmp_path, HEAD + "cells: {a: &a {page_size: 16, tp: 2}, b: {<<: *a, tp: 3}}")
    assert (b.features.page_size, b.features.tp, a.features.tp) == (16, 3, 2)


AXES = st.fixed_dictionaries(
    {},
    optional={
        "page_size": st.lists(st.sampled_from([1, 16, 256]), min_size=1, unique=True),
        "max_running": st.lists(st.integers(1, 4), min_size=1, unique=True),
        "retract": st.lists(st.sampled_from([None, {"interval": 1}, {"interval": 3}]), min_size=1, max_size=1),
    },
)
PART = st.fixed_dictionaries(
    {}, optional={"page_size": st.sampled_from([1, 16, 256]), "max_running": st.integers(1, 4)}
)
CELLS = st.dictionaries(st.sampled_from(["base", "other", "third"]), PART, min_size=1)
FORMS = st.fixed_dictionaries(
    {"cells": CELLS, "axes": AXES, "exclude": st.lists(PART, max_size=2), "include": st.lists(PART, max_size=3)}
)


@given(FORMS)
def test_expansion_is_a_function_of_the_form(form: dict[str, Any]) -> None:
    again = {key: form[key] for key in reversed(form)}  # the order of the sections means nothing
    assert combinations(form) == combinations(again)


@given(FORMS)
def test_without_include_the_cells_are_the_product_less_the_excluded(form: dict[str, Any]) -> None:
    form = {**form, "include": []}
    expected = 0
    for own in form["cells"].values():
        count = 1
        for axis, values in form["axes"].items():
            count *= 1 if axis in own else len(values)
        expected += count
    assert len(combinations({**form, "exclude": []})) == expected
    found = combinations(form)
    assert len({combination.name for combination in found}) == len(found) <= expected
    for combination in found:
        for entry in form["exclude"]:
            assert not entry or any(combination.chosen.get(key) != value for key, value in entry.items())


@given(FORMS)
def test_include_never_changes_what_an_axis_or_cell_chose(form: dict[str, Any]) -> None:
    plain = {c.name: c.chosen for c in combinations({**form, "include": []})}
    for combination in combinations(form)[: len(plain)]:
        values = merge(form, combination, "reference").values
        for key, value in plain[combination.name].items():
            assert key == "cell" or values[key] == value


def test_another_process_collects_the_same_cells(tmp_path: Path) -> None:
    text = HEAD + "cells: {b: {}, a: {args: {z: 1, y: 2}}}\naxes: {page_size: [1, 16], retract: [null, {}]}\n"
    here = [(cell.name, cell.launch_key) for cell in cells_of(tmp_path, text)]
    program = (
        "import sys; from pathlib import Path; from pytest_kvcheck.matrix.loader import load\n"
        "names = {'kv-inheritance': frozenset()}\n"
        "cells = load(Path(sys.argv[1]), engine=None, device='cpu', workload_names=names)\n"
        "print([(cell.name, cell.launch_key) for cell in cells])"
    )
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "m.yaml")],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.strip() == str(here)


def test_equal_features_share_a_server(tmp_path: Path) -> None:
    a, b, c = cells_of(tmp_path, HEAD + "cells: {a: {}, b: {page_size: 1}, c: {page_size: 16}}")
    assert a.launch_key == b.launch_key != c.launch_key
    assert dataclasses.replace(a, plant=("x",)).launch_key != a.launch_key
