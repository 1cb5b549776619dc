"""The transformers scorer agrees with a forward pass of our own, and says in words why it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import RECIPES, Decoder
from scorer_helpers import NONE, interpreter

from pytest_kvcheck.engines.scorer import ScorerError, TransformersScorer
from pytest_kvcheck.reference import synthetic


@pytest.fixture
def python() -> str:
    found = interpreter()
    if not found:
        pytest.skip(NONE)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-swa"])
def test_scores_are_those_of_our_own_forward_pass(name: str, python: str, tmp_path: Path) -> None:
    synthetic.make(RECIPES / name, tmp_path / name)
    rng = torch.Generator().manual_seed(3)
    with TransformersScorer(str(tmp_path / name), python) as scorer:
        for length in (1, 2, 300):
            ids = torch.randint(512, (1, length), generator=rng)
            scores = scorer.score(ids[0].tolist())
            assert scores[0] is None
            rest = torch.tensor(scores[1:], dtype=torch.float32)
            torch.testing.assert_close(rest, Decoder(name).scores(ids)[0], atol=1e-4, rtol=0)
        with pytest.raises(ScorerError, match=r"ids must be a list of integers in \[0, 512\)"):
            scorer.score([5, 512])
        assert scorer.score([7]) == [None], "a refused request does not end the scorer"


@pytest.mark.slow
def test_a_model_that_transformers_does_not_know(python: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "architectures": ["NoSuchModel"]}')
    with pytest.raises(ScorerError, match=r"does not support this model: .*no-such-model"):
        TransformersScorer(str(tmp_path), python)


def script(folder: Path, body: str) -> str:
    """An "interpreter" that runs ``body`` instead of the worker."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            """echo '{"error": "ModuleNotFoundError: No module named X"}'""",
            "Install torch and transformers there",
        ),
        ("echo out of memory >&2", "went away.*its last words: out of memory"),
        ("sleep 30", "did not answer in 1 s"),
    ],
)
def test_a_worker_that_cannot_start_is_one_paragraph(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(ScorerError, match=said) as caught:
        TransformersScorer("/models/some", script(tmp_path, f"exec 0<&-\n{body}"), deadline=1)
    assert "\n" not in str(caught.value)


def test_no_interpreter() -> None:
    with pytest.raises(ScorerError, match="/nowhere/python does not run"):
        TransformersScorer("/models/some", "/nowhere/python")


def test_a_worker_that_dies_later(tmp_path: Path) -> None:
    hello = """echo '{"model": "M", "transformers": "5"}'; read line; echo killed >&2"""
    scorer = TransformersScorer("/models/some", script(tmp_path, hello))
    with pytest.raises(ScorerError, match=r"went away.*killed"):
        scorer.score([1])
    with pytest.raises(ScorerError, match=r"is gone|went away"):
        scorer.score([1])
    scorer.close()
    scorer.close()
