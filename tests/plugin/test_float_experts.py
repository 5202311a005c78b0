"""Unquantized experts on CPU are chosen and multiplied by this package's operators, with the result
of SGLang's own loop; settings that are not computed here stay with SGLang.

The oracle of the products is float64, that of the choice SGLang's own function.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.sglang

NUM_EXPERTS, WIDTH, INNER, K = 8, 48, 24, 2


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def experts():
    from sglang.srt.platforms import current_platform

    from sglang_ascend.plugin.cpu import experts

    current_platform.init_backend()
    return experts


def mixture(dtype: torch.dtype, **settings):
    """SGLang's method, a layer with its weights, and what SGLang's dispatcher hands over."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.with_bias = settings.pop("with_bias", False)
    method.moe_runner_config = MoeRunnerConfig(**settings)
    layer = torch.nn.Module()
    layer.num_experts = layer.num_local_experts = NUM_EXPERTS
    layer.w13_weight = (noise(NUM_EXPERTS, 2 * INNER, WIDTH) / WIDTH**0.5).to(dtype)
    layer.w2_weight = (noise(NUM_EXPERTS, WIDTH, INNER, seed=1) / INNER**0.5).to(dtype)
    return method, layer


def dispatched(num_rows: int, dtype: torch.dtype):
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:K] for _ in range(num_rows)]).int()
    weights = noise(num_rows, K, seed=2).softmax(-1)
    x = noise(num_rows, WIDTH, seed=3).to(dtype)
    return SimpleNamespace(hidden_states=x, topk_output=(weights, ids, None))


def exact(layer, given) -> torch.Tensor:
    weights, ids = given.topk_output[:2]
    rows = []
    for x, shares, chosen in zip(given.hidden_states.double(), weights, ids, strict=True):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for share, e in zip(shares.double(), chosen.tolist(), strict=True):
            gate, up = (layer.w13_weight[e].double() @ x).chunk(2)
            total += share * (layer.w2_weight[e].double() @ (gate * gate.sigmoid() * up))
        rows.append(total)
    return torch.stack(rows)


# float32 sums; of bf16 four roundings of 2^-9: of gate and up, their product, each expert's result,
# and the sum.
TOLERANCES = {torch.float32: 2.0**-18, torch.bfloat16: 4 * 2.0**-9}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_rows_go_through_swiglu_of_their_experts(experts, dtype, num_rows):
    method, layer = mixture(dtype)
    assert method._resolve_forward_method().__module__ == experts.__name__
    given = dispatched(num_rows, dtype)
    found = method._resolve_forward_method()(layer, given).hidden_states
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    assert found.dtype == dtype
    assert_close(found.double(), exact(layer, given), **tolerance)
    assert_close(found, method.forward_cpu(layer, given).hidden_states, **tolerance)
    layer.w13_weight = layer.w13_weight.flip(1)
    assert not torch.allclose(found.double(), exact(layer, given), **tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "gelu"},
        {"gemm1_alpha": 1.7},
        {"swiglu_limit": 7.0},
        {"apply_router_weight_on_input": True},
        {"with_bias": True},
    ],
    ids=str,
)
def test_other_experts_stay_with_sglang(experts, settings):
    method, layer = mixture(torch.float32, **settings)
    method.forward_cpu = MethodType(lambda *args: "SGLang's own", method)
    given = dispatched(1, torch.float32)
    assert method._resolve_forward_method()(layer, given) == "SGLang's own"


def choice(**settings):
    """SGLang's TopK with the configuration of a DeepSeek-V3 of 8 experts."""
    from sglang.srt.layers.moe.topk import TopK, TopKConfig, TopKOutputFormat

    topk = TopK.__new__(TopK)
    torch.nn.Module.__init__(topk)
    config = {
        "top_k": K,
        "use_grouped_topk": True,
        "topk_group": 2,
        "num_expert_group": 4,
        "correction_bias": noise(NUM_EXPERTS, seed=5) / 8,
        "routed_scaling_factor": 1.5,
        "output_format": TopKOutputFormat.STANDARD,
        "allow_routed_experts_capture": False,
    }
    topk.topk_config = TopKConfig(**{**config, **settings})
    topk.layer_id, topk.is_draft = 0, True
    topk.enable_waterfill, topk.waterfill_balancer = False, None
    return topk


@pytest.mark.parametrize("is_scaled", [False, True])
def test_experts_are_chosen_as_sglang_chooses(experts, is_scaled):
    topk = choice(apply_routed_scaling_factor_on_output=is_scaled)
    assert topk._resolve_forward_method().__module__ == experts.__name__
    x, logits = noise(33, WIDTH), noise(33, NUM_EXPERTS, seed=4)
    found = topk._resolve_forward_method()(x, logits)
    expected = topk.forward_native(x, logits)

    def by_expert(output):
        dense = torch.zeros(33, NUM_EXPERTS)
        return dense.scatter(1, output.topk_ids.long(), output.topk_weights)

    assert_close(by_expert(found), by_expert(expected))
    astray = topk._resolve_forward_method()(x, logits.flip(0))
    assert not torch.allclose(by_expert(astray), by_expert(expected))


@pytest.mark.parametrize(
    "settings",
    [
        {"correction_bias": None},
        {"renormalize": False},
        {"use_grouped_topk": False},
        {"custom_routing_function": lambda **inputs: None},
        {"num_expert_group": NUM_EXPERTS},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_another_choice_stays_with_sglang(experts, settings):
    topk = choice(**settings)
    topk.forward_native = MethodType(lambda *args, **rest: "SGLang's own", topk)
    x, logits = noise(1, WIDTH), noise(1, NUM_EXPERTS)
    assert topk._resolve_forward_method()(x, logits) == "SGLang's own"
