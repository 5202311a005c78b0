"""A packed copy of a weight is used only while it is the weight; it changes no other layer.

Oracles are products in float64 of the weights that the layer holds now.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.sglang


@pytest.fixture
def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def forbidden(*args, **kwargs):
    raise AssertionError("the original was called")


def run_linear(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    from sglang_ascend.plugin.prepared_weights import apply_linear

    return apply_linear(None, layer, x)


def is_product(result: torch.Tensor, layer: torch.nn.Module, x: torch.Tensor) -> bool:
    return torch.allclose(result.double(), x.double() @ layer.weight.double().T, atol=1e-5)


def test_a_layer_gives_its_product(layer, x):
    assert is_product(run_linear(layer, x), layer, x)


def test_a_weight_put_in_its_place_is_used_at_once(layer, x):
    run_linear(layer, x)
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
    assert is_product(run_linear(layer, x), layer, x)


def test_a_change_in_place_is_used_once_the_packed_copies_are_forgotten(layer, x):
    from sglang_ascend.plugin.prepared_weights import forget_prepared_weights

    run_linear(layer, x)
    layer.weight.data.copy_(-layer.weight)
    assert not is_product(run_linear(layer, x), layer, x)
    forget_prepared_weights()
    assert is_product(run_linear(layer, x), layer, x)


def plain_head(layer: torch.nn.Module) -> torch.nn.Module:
    from sglang.srt.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    layer.quant_method = UnquantizedEmbeddingMethod()
    return layer


def processor(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"use_fp32_lm_head": False, "rl_on_policy_target": None} | changes)


def test_a_plain_head_gives_its_product(layer, x):
    from sglang_ascend.plugin.prepared_weights import compute_lm_head

    head = plain_head(layer)
    assert is_product(compute_lm_head(forbidden, processor(), x, head), head, x)


@pytest.mark.parametrize("reason", ["quantized", "lora", "fp32 head", "on policy", "dtype"])
def test_every_other_head_is_left_to_sglang(layer, x, reason):
    from sglang_ascend.plugin.prepared_weights import compute_lm_head

    head, options = plain_head(layer), {}
    if reason == "quantized":
        head.quant_method = object()
    if reason == "lora":
        head.apply_lora = forbidden
    if reason == "fp32 head":
        options["use_fp32_lm_head"] = True
    if reason == "on policy":
        options["rl_on_policy_target"] = "fsdp"
    if reason == "dtype":
        x = x.bfloat16()
    calls = []
    compute_lm_head(lambda *args, **kwargs: calls.append(args), processor(**options), x, head)
    assert len(calls) == 1
