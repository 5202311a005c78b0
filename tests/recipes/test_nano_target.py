"""nano-deepseek's training model computes what transformers' DeepseekV3ForCausalLM computes.

If the two differed, training would fit a model that no server runs.
"""

import math

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from recipes.nano_deepseek import model
from recipes.nano_deepseek.checkpoint import load_target
from recipes.nano_deepseek.experts import Router
from sglang_ascend.models.nano_deepseek import ARTIFACT

LENGTHS = (1, 7, 300)
TOLERANCE = 1e-4  # fp32, other order of sums: 5e-6 seen on logits up to 13


@pytest.fixture(scope="module")
def oracle() -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM.from_pretrained(ARTIFACT, dtype=torch.float32).eval()


def largest_difference(oracle: DeepseekV3ForCausalLM, length: int) -> float:
    target = load_target(ARTIFACT)
    ids = torch.randint(6, 4096, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        return (target(ids) - oracle(ids).logits).abs().max().item()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(oracle: DeepseekV3ForCausalLM, length: int) -> None:
    assert largest_difference(oracle, length) < TOLERANCE


def test_logits_stay_finite_beyond_the_trained_lengths() -> None:
    target = load_target(ARTIFACT)
    ids = torch.randint(6, 4096, (1, 2048), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert target(ids).isfinite().all()


def rotate_halves(self, x, positions):
    angles = positions[:, None].float() * self.frequencies
    cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def plain_frequencies(config):
    dim = config.qk_rope_head_dim
    return config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def route_without_groups(self, x):
    scores = torch.nn.functional.linear(x.float(), self.weight.float()).sigmoid()
    ids = (scores + self.e_score_correction_bias).topk(self.config.num_experts_per_tok, -1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor, ids


BROKEN = {
    "rope on halves": (model.MultiHeadLatentAttention, "rotate", rotate_halves),
    "rope without yarn": (model, "rope_frequencies", plain_frequencies),
    "softmax scale without mscale": (
        model,
        "softmax_scale",
        lambda config: 1 / math.sqrt(config.qk_head_dim),
    ),
    "softmax scale of the wrong dimension": (
        model,
        "softmax_scale",
        lambda config: 1 / math.sqrt(config.kv_lora_rank),
    ),
    "routing without groups": (Router, "forward", route_without_groups),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_comparison_sees_each_fault(
    fault: str, oracle: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BROKEN[fault])
    assert largest_difference(oracle, length=300) > 100 * TOLERANCE
