"""A checkpoint with as many tokens as DeepSeek-R1 has, so that SGLang's thinking budget for that
model is served of it. What the added tokens would say is never said, unless a budget forces it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

START, END, NEW_LINE, VOCAB_SIZE = 128_798, 128_799, 201, 129_280


def sglangs_budget() -> str:
    """What a request sends for one."""
    from sglang.srt.sampling.custom_logit_processor import DeepSeekR1ThinkingBudgetLogitProcessor

    return DeepSeekR1ThinkingBudgetLogitProcessor().to_str()


def widen(model: Path, folder: Path) -> Path:
    """Added tokens look like the others, and have a logit of 0."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weights[name] = weight[torch.arange(VOCAB_SIZE) % len(weight)]
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            weights[name] = torch.nn.functional.pad(weight, (0, 0, 0, VOCAB_SIZE - len(weight)))
    save_file(weights, file, metadata={"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": VOCAB_SIZE}))
    return folder


def check_used(tokens: list[int], budget: int) -> None:
    """Of a reply that begins behind ``START``."""
    assert tokens.count(END) == 1
    used = tokens.index(END)
    assert tokens[used - 1] == NEW_LINE and used in (budget, budget + 1)
