"""What transformers' own model, on the CPU, says of a server's tokens.

Once in the dtype that is served, and once exactly: in fp32, of a server in fp32 in float64. How far
the two are apart is what rounding may do at a place, known without the server that is judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# MiMo is Qwen2 with an MTP layer, which the reference does not need.
CLASSES = {"qwen2": "Qwen2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
WITH_EXPERTS = {"deepseek_v3"}
# What is served -> the same, and what counts as exact beside it.
DTYPES = {
    "float32": (torch.float32, torch.float64),
    "bfloat16": (torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Judged:
    """Of each token of a reply, in nats: how far it is from the best one, and what it has."""

    gaps: list[float]  # 0 where the exact reference would say the same
    logprobs: list[float]
    margins: list[float]  # between the best two tokens
    ties: list[float]  # twice the largest error of the reference in the served dtype: two logits'
    chosen: list[bool]  # the reference in the served dtype says the same


class ReferenceTokens:
    """Eager attention, one sequence at a time, no cache. Raises ValueError for other families.

    ``dtype`` is the served one: "float32" or "bfloat16".
    """

    def __init__(self, folder: Path, dtype: str) -> None:
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
        self.has_experts = family in WITH_EXPERTS
        # Its default for experts, a grouped product, takes no float64.
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.rounded, self.exact = (
            loader.from_pretrained(folder, dtype=kind, **eager).eval() for kind in DTYPES[dtype]
        )

    def prompt(self, message: str) -> list[int]:
        turns = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def judge(self, prompt: Sequence[int], tokens: Sequence[int]) -> Judged:
        sequence = torch.tensor([[*prompt, *tokens]])
        rounded, exact = (
            model(sequence).logits[0, len(prompt) - 1 : -1].double()
            for model in (self.rounded, self.exact)
        )
        logprobs = torch.log_softmax(exact, dim=-1)
        said = torch.tensor(tokens)
        found = logprobs.gather(1, said[:, None])[:, 0]
        best = logprobs.topk(2).values
        return Judged(
            gaps=(best[:, 0] - found).tolist(),
            logprobs=found.tolist(),
            margins=(best[:, 0] - best[:, 1]).tolist(),
            ties=(2 * (rounded - exact).abs().amax(-1)).tolist(),
            chosen=(rounded.argmax(-1) == said).tolist(),
        )
