"""The synthetic models have the properties that the log-prob oracle and the speculation workloads rest on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from model_helpers import RECIPES, Decoder, Draft

from pytest_kvcheck.reference import synthetic

ALL = sorted(folder.name for folder in RECIPES.iterdir())
TARGETS = ("tiny-llama", "tiny-llama-8", "tiny-swa", "tiny-swa-127")
DRAFTS = (("tiny-llama", "tiny-llama-eagle"), ("tiny-llama-8", "tiny-llama-8-eagle3"))


def prompts(model: Decoder, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """Ids of which 3 in 4 follow the permutation, as in a chat that holds the model's own words."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(synthetic.SPECIAL), model.config["vocab_size"], (batch, tokens), generator=rng)
    assert model.follows is not None
    for i in range(1, tokens):
        follow = torch.rand(batch, generator=rng) < 0.75
        ids[:, i] = torch.where(follow, model.follows[ids[:, i - 1]], ids[:, i])
    return ids


@pytest.mark.parametrize("name", TARGETS)
def test_the_permutation_is_one_cycle_without_special_ids(name: str) -> None:
    follows = synthetic.permutation(synthetic.read_recipe(RECIPES / name))
    token, seen = follows[0], list[int]()
    while token not in seen:
        seen.append(token)
        token = follows[token]
    assert sorted(seen) == list(range(len(synthetic.SPECIAL), 512))


@pytest.mark.parametrize("name", TARGETS)
def test_the_greedy_token_is_the_permutations_in_70_to_85_percent_of_contexts(name: str) -> None:
    model = Decoder(name)
    assert model.follows is not None
    ids = prompts(model, 6, 320, seed=1)
    greedy = model.logits(ids).argmax(-1)
    assert greedy.min() >= len(synthetic.SPECIAL)
    agree = (greedy == model.follows[ids]).float()
    assert 0.70 <= agree.mean() <= 0.85, agree.mean()
    # Not only on average: the model must not change its nature as a session grows.
    by_length = [part.mean().item() for part in agree[:, 20:].split(100, dim=1)]
    assert all(0.60 <= share <= 0.92 for share in by_length), by_length


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("fault", ["token", "slot", "missing"])
def test_one_fault_in_the_history_moves_the_next_100_logprobs(name: str, fault: str) -> None:
    """``token``: another id stood there; ``slot``: the cache holds another position's KV in its place;
    ``missing``: the history is one token short. The fault lies in the last 32 tokens of a history of 96.
    """
    model, means, maxima = Decoder(name), list[float](), list[float]()
    for seed in range(12):
        ids = prompts(model, 1, 197, seed)
        at, other = 64 + (7 * seed) % 32, 16 + seed
        right = model.scores(ids)[0]
        if fault == "slot":
            wrong = model.scores(ids, slot=(at, other))[0]
        elif fault == "token":
            changed = ids.clone()
            changed[0, at] = ids[0, other] if ids[0, other] != ids[0, at] else ids[0, other + 1]
            wrong = model.scores(changed)[0]
        else:
            wrong = torch.cat([right[:1], model.scores(torch.cat([ids[:, :at], ids[:, at + 1 :]], 1))[0]])
        moved = (wrong - right)[at + 1 : at + 101].abs()
        means.append(moved.mean().item())
        maxima.append(moved.max().item())
    assert sum(means) / len(means) >= 0.05, means
    assert min(maxima) >= 0.2, maxima


@pytest.mark.parametrize(("target", "draft"), DRAFTS)
def test_drafts_are_accepted_with_a_real_spread(target: str, draft: str) -> None:
    """Rounds of three drafts give 1..4 tokens, each count in at least 5 % of the rounds."""
    model = Decoder(target)
    guesser, rounds = Draft(draft, model), Counter[int]()
    for seed in range(4):
        length = 30 + 20 * seed
        text = model.greedy(prompts(model, 1, length, seed), 48)[0]
        while length < len(text) - 4:
            drafts = guesser.guess(text[: length + 1], 3)
            wanted = text[length + 1 : length + 4].tolist()
            accepted = next((i for i in range(3) if drafts[i] != wanted[i]), 3)
            rounds[accepted + 1] += 1
            length += accepted + 1
    shares = [rounds[i] / rounds.total() for i in (1, 2, 3, 4)]
    assert min(shares) >= 0.05, shares
    assert max(shares) <= 0.75, shares


def test_the_vllm_draft_differs_from_sglangs_only_in_its_class_and_the_missing_bias() -> None:
    ours = synthetic.weights_of(RECIPES / "tiny-llama-eagle")
    theirs = synthetic.weights_of(RECIPES / "tiny-llama-eagle-vllm")
    assert ours.keys() - theirs.keys() == {"fc.bias"}
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


def test_weights_are_the_same_on_every_machine() -> None:
    """The golden value stands for all numbers: log-probs recorded in traces mean nothing once it changes."""
    digest = hashlib.sha256()
    for name, value in sorted(synthetic.weights_of(RECIPES / "tiny-llama").items()):
        digest.update(name.encode() + value.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest()[:16] == "aebe701068230c31"


@pytest.mark.parametrize("name", ALL)
def test_a_made_folder_is_in_hugging_face_layout_and_the_same_each_time(name: str, tmp_path: Path) -> None:
    for copy in ("a", "b"):
        assert synthetic.main([str(RECIPES / name), str(tmp_path / copy)]) == 0
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    vocab = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(512))
    assert vocab["t17"] == 17


def test_the_maker_refuses_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(recipe: str) -> str:
        (tmp_path / "recipe.json").write_text(recipe)
        assert synthetic.main([str(tmp_path), str(tmp_path / "out")]) == 1
        return capsys.readouterr().err

    good = json.loads((RECIPES / "tiny-llama" / "recipe.json").read_text())
    assert "is not JSON" in complaint("{")
    assert "expected an object with config, kind, scales, seed" in complaint("[]")
    assert "unknown kind 'gguf'" in complaint(json.dumps(good | {"kind": "gguf"}))
    assert "lacks 'q_recency'" in complaint(json.dumps(good | {"scales": {"lm_head": 0.1}}))
    assert not (tmp_path / "out").exists()
    assert synthetic.main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert "cannot read the recipe" in capsys.readouterr().err


def test_the_maker_does_not_touch_a_folder_that_holds_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert synthetic.main([str(RECIPES / "tiny-llama"), str(tmp_path)]) == 1
    assert "must be absent or empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
