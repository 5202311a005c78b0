"""What transformers' own model, in fp32 on the CPU, says of a server's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# MiMo is Qwen2 with an MTP layer, which the reference does not need.
CLASSES = {"qwen2": "Qwen2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


@dataclass(frozen=True)
class Judged:
    """Of each token of a reply, in nats: how far it is from the best one, and what it has."""

    gaps: list[float]  # 0 where the reference would say the same
    logprobs: list[float]
    margins: list[float]  # between the best two tokens


class ReferenceTokens:
    """Eager attention, one sequence at a time, no cache. Raises ValueError for other families."""

    def __init__(self, folder: Path) -> None:
        import transformers

        family = json.loads((folder / "config.json").read_text())["model_type"]
        if family not in CLASSES:
            raise ValueError(
                f"{folder} is of model_type {family}, for which no reference is known: choose "
                f"{' or '.join(CLASSES)}."
            )
        # The MTP layer's weights are not the reference's, which it would report at length.
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        loader: Any = getattr(transformers, CLASSES[family])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = loader.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def prompt(self, message: str) -> list[int]:
        turns = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def judge(self, prompt: Sequence[int], tokens: Sequence[int]) -> Judged:
        sequence = torch.tensor([[*prompt, *tokens]])
        logits = self.model(sequence).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        best = logprobs.topk(2).values
        return Judged(
            (best[:, 0] - chosen).tolist(), chosen.tolist(), (best[:, 0] - best[:, 1]).tolist()
        )
