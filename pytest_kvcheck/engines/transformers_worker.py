#!/usr/bin/env python3
"""Scores token histories with transformers: ``python transformers_worker.py MODEL_DIR [DTYPE]``.

Runs by path under any interpreter that has torch and transformers; it imports nothing of pytest_kvcheck. The
first line on stdout is ``{"model": CLASS, "transformers": VERSION, "dtype": DTYPE}`` or ``{"error": TEXT}``;
then each line ``{"ids": [...]}`` on stdin is answered by ``{"logprobs": [null, ...]}`` or ``{"error": TEXT}``,
until stdin ends.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ROWS = 256
"""Positions whose log-probs are taken at once, so that a large vocabulary does not double the memory."""


def load(model_dir: str, dtype: str) -> Any:
    """The model with the plainest attention there is, so that nothing is shared with an engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def score(model: Any, ids: list[int]) -> list[float | None]:
    """The log-prob of each token given those before it; the first has none."""
    import torch

    vocab = model.config.vocab_size
    longest = getattr(model.config, "max_position_embeddings", None)
    if not ids or not all(isinstance(i, int) and 0 <= i < vocab for i in ids):
        raise ValueError(f"ids must be a list of integers in [0, {vocab}), at least one")
    if longest and len(ids) > longest:
        raise ValueError(f"{len(ids)} ids are more than the model's {longest} positions")
    tokens = torch.tensor(ids)
    found: list[float | None] = [None]
    with torch.inference_mode():
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
        for at in range(0, len(ids) - 1, ROWS):
            scores = logits[at : at + ROWS].float().log_softmax(-1)
            found += scores.gather(1, tokens[at + 1 : at + 1 + ROWS, None])[:, 0].tolist()
    return found


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 2):
        print("usage: python transformers_worker.py MODEL_DIR [DTYPE]", file=sys.stderr)
        return 2
    # Libraries that print must not break the protocol: it keeps the real stdout for itself.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    # Text needs neither, and engines' environments often hold a build that does not fit their torch: with it,
    # transformers imports nothing at all. None in sys.modules means "not installed".
    sys.modules.update({"torchvision": None, "torchaudio": None})  # type: ignore[dict-item]
    try:
        import transformers

        model = load(argv[0], argv[1] if len(argv) > 1 else "float32")
    except Exception as error:  # whatever it is, the other side tells its user
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    dtype = str(model.dtype).removeprefix("torch.")
    answer({"model": type(model).__name__, "transformers": transformers.__version__, "dtype": dtype})
    for line in sys.stdin:
        try:
            answer({"logprobs": score(model, json.loads(line)["ids"])})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
