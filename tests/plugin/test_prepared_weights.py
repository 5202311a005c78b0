"""A packed copy of a weight is used only while it is the weight; it changes no other layer.

Oracles are products in float64 of the weights that the layer holds now.
"""

from __future__ import annotations

import pytest
import torch
from products import is_product

pytestmark = pytest.mark.sglang


@pytest.fixture
def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(bfloat16s_values(6, 4), requires_grad=False)
    return module


def bfloat16s_values(*shape: int) -> torch.Tensor:
    """float32 of which the prepared weight has copies only."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.bfloat16().float()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def run_linear(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    from sglang_ascend.plugin.cpu.layers import PreparedLinear

    return PreparedLinear().apply(layer, x)


def test_a_layer_gives_its_product(layer, x):
    assert is_product(run_linear(layer, x), x, layer.weight)
    # The control: operands in half the digits would be seen.
    assert not is_product(run_linear(layer, x.half().float()), x, layer.weight)


def test_a_weight_put_in_its_place_is_used_at_once(layer, x):
    run_linear(layer, x)
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
    assert is_product(run_linear(layer, x), x, layer.weight)


def test_a_change_in_place_is_used_once_the_packed_copies_are_forgotten(layer, x):
    from sglang_ascend.plugin.cpu.layers import forget_prepared_weights

    run_linear(layer, x)
    layer.weight.data.copy_(-layer.weight)
    assert not is_product(run_linear(layer, x), x, layer.weight)
    forget_prepared_weights()
    assert is_product(run_linear(layer, x), x, layer.weight)


class Ends(torch.nn.Module):
    """A model of one layer: a linear, or what makes logits of it."""

    def __init__(self, layer: torch.nn.Module, **processor) -> None:
        from sglang.srt.layers.logits_processor import LogitsProcessor

        super().__init__()
        self.layer = layer
        self.logits = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(self.logits)
        vars(self.logits).update(use_fp32_lm_head=False, rl_on_policy_target=None)
        vars(self.logits).update(processor)


def method_after_loading(layer: torch.nn.Module, method: object, **processor) -> object:
    from sglang.srt.platforms import current_platform

    layer.quant_method = method
    current_platform.post_load_model(Ends(layer, **processor))
    return layer.quant_method


def test_the_platform_gives_linears_and_heads_packed_weights(layer, x, loaded_plugins):
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )

    from sglang_ascend.plugin.cpu.layers import PreparedHead, PreparedLinear

    linear = method_after_loading(layer, UnquantizedLinearMethod())
    assert type(linear) is PreparedLinear
    head = method_after_loading(layer, UnquantizedEmbeddingMethod())
    assert type(head) is PreparedHead
    # SGLang asks this before it lets a head's method make logits.
    assert should_apply_lm_head_quant_method(layer, head)
    assert not should_apply_lm_head_quant_method(layer, UnquantizedEmbeddingMethod())
    assert is_product(head.apply(layer, x), x, layer.weight)
    assert head.apply(layer, x.bfloat16()).dtype == layer.weight.dtype


def test_the_projection_of_an_mtp_layer_is_packed_and_follows_its_weight(x, loaded_plugins):
    from sglang.srt.platforms import current_platform

    from sglang_ascend.plugin.cpu.layers import _PREPARED, forget_prepared_weights

    projection = torch.nn.Linear(4, 6)
    projection.weight.data.copy_(bfloat16s_values(6, 4))
    current_platform.post_load_model(Ends(projection))
    assert is_product(projection(x) - projection.bias, x, projection.weight)
    assert _PREPARED[projection].dense is projection.weight
    projection.weight.data.copy_(-projection.weight)
    assert not is_product(projection(x) - projection.bias, x, projection.weight)
    forget_prepared_weights()
    assert is_product(projection(x) - projection.bias, x, projection.weight)


@pytest.mark.parametrize("option", [{"use_fp32_lm_head": True}, {"rl_on_policy_target": "fsdp"}])
def test_a_head_of_another_dtype_is_left_to_sglang(layer, option, loaded_plugins):
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    method = UnquantizedEmbeddingMethod()
    assert method_after_loading(layer, method, **option) is method


def test_so_is_every_other_method(layer, loaded_plugins):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class Quantized(UnquantizedLinearMethod):
        pass

    method = Quantized()
    assert method_after_loading(layer, method) is method
