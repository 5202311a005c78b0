"""Whether served tokens are those of transformers' own model: greedy ones, and sampled ones.

At each place the oracle is given the tokens that were served before it, so that every place is
judged, also those behind a tie. A greedy token is right if it is transformers' in bfloat16. Another
is right only where bfloat16 cannot tell: its float32 logit is below the largest one by no more than
bfloat16 moves two logits apart at this place, which is twice transformers' largest error there. One
token in ten may be right that way, so that the allowance hides no error that comes back.

A router is less steady than logits are: rounding that sends an earlier token to another expert
moves these by more than transformers' own error at the place shows (seen: 0.7 nats). So a token of
a model of experts is compared with other roundings too: transformers in bfloat16 again, each
product rounded up or down by chance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    HYV3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3MoeForCausalLM,
)

# MiMo is Qwen2 with an MTP layer, which the oracle does not need.
CLASSES = {
    "qwen2": Qwen2ForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
    "glm4_moe": Glm4MoeForCausalLM,
    "glm4_moe_lite": Glm4MoeLiteForCausalLM,
    "ernie4_5_moe": Ernie4_5_MoeForCausalLM,
    "hy_v3": HYV3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}


# Of a router that is sent elsewhere by one rounding in eight, 32 leave one case in 70 unseen.
NUM_ROUNDINGS = 32


@dataclass(frozen=True)
class Judgement:
    num_tokens: int
    num_ties: int  # right, though not transformers' token in bfloat16
    wrong: list[int]  # places in the output


class Oracle:
    def __init__(self, folder: Path) -> None:
        model_type = json.loads((folder / "config.json").read_text())["model_type"]
        self.has_experts = model_type != "qwen2"
        self.models = {
            dtype: CLASSES[model_type].from_pretrained(folder, dtype=dtype).eval()
            for dtype in (torch.bfloat16, torch.float32)
        }

    @torch.inference_mode()
    def logits(self, dtype: torch.dtype, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """float32 [len(output), vocabulary]: what each output token was chosen from."""
        tokens = torch.tensor([[*prompt, *output[:-1]]])
        return self.models[dtype](tokens).logits[0, len(prompt) - 1 :].float()

    def greedy(self, prompt: Sequence[int], output: Sequence[int]) -> Judgement:
        rounded = self.logits(torch.bfloat16, prompt, output)
        exact = self.logits(torch.float32, prompt, output)
        served = torch.tensor(output)
        same = served == rounded.argmax(-1)
        moved = 2 * (rounded - exact).abs().amax(-1)
        right = same | (below_largest(exact, served) <= moved)
        if self.has_experts:
            for seed in range(NUM_ROUNDINGS):
                if right.all():
                    break
                rounded_by_chance = self.logits_rounded_by_chance(seed, prompt, output)
                right |= below_largest(rounded_by_chance, served) <= moved
        return Judgement(len(output), int((~same & right).sum()), (~right).nonzero()[:, 0].tolist())

    def logits_rounded_by_chance(
        self, seed: int, prompt: Sequence[int], output: Sequence[int]
    ) -> Tensor:
        """``logits`` in bfloat16, of products of which each number is rounded up or down, by how
        near it is. float32 ones, the router's, are not."""
        generator = torch.Generator().manual_seed(seed)

        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            exact = linear(x.float(), weight.float(), None if bias is None else bias.float())
            if x.dtype == torch.float32:
                return exact
            discarded = torch.randint(1 << 16, exact.shape, generator=generator, dtype=torch.int32)
            bits = exact.view(torch.int32) + discarded
            return (bits & -(1 << 16)).view(torch.float32).bfloat16()

        linear = torch.nn.functional.linear
        with patch.object(torch.nn.functional, "linear", product):
            return self.logits(torch.bfloat16, prompt, output)

    def check_greedy(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
        """No token is wrong, and at most one in ten owes that to a tie."""
        judged = [self.greedy(*pair) for pair in zip(prompts, outputs, strict=True)]
        num_tokens = sum(judgement.num_tokens for judgement in judged)
        assert not any(judgement.wrong for judgement in judged), judged
        assert 10 * sum(judgement.num_ties for judgement in judged) <= num_tokens, judged

    def summary(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> str:
        """What `check_greedy` judges, in words."""
        judged = [self.greedy(*pair) for pair in zip(prompts, outputs, strict=True)]
        return (
            f"{sum(found.num_tokens for found in judged)} tokens, "
            f"{sum(found.num_ties for found in judged)} in a tie, "
            f"{sum(len(found.wrong) for found in judged)} wrong"
        )

    def outside_nucleus(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float, top_p: float
    ) -> list[int]:
        """Places of tokens that are less likely than the least one that top-p keeps, by more than
        bfloat16 moves two logits apart there."""
        exact = self.logits(torch.float32, prompt, output) / temperature
        moved = (self.logits(torch.bfloat16, prompt, output) / temperature - exact).abs().amax(-1)
        ordered = exact.sort(-1, descending=True).values
        mass = ordered.softmax(-1)
        num_kept = ((mass.cumsum(-1) - mass) < top_p).sum(-1, keepdim=True)
        least = ordered.gather(1, num_kept - 1)[:, 0]
        served = exact.gather(1, torch.tensor(output)[:, None])[:, 0]
        return (served < least - 2 * moved).nonzero()[:, 0].tolist()


def below_largest(logits: Tensor, tokens: Tensor) -> Tensor:
    """[places]: by how much the token's logit is below the largest one."""
    return logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]
