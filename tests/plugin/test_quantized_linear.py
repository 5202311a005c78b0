"""A quantized linear is the product of its decoded parts, in their order, of this rank's slice."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from sglang_ascend.quantization.formats import INT8
from sglang_ascend.quantization.rows import to_rows
from sglang_ascend.quantization.weight import (
    WEIGHT_ONLY,
    InputKind,
    InputRule,
    QuantizedWeight,
)

WIDTH = 12
QKV_SIZES = [8, 4, 4]


def weight_of(
    num_rows: int, seed: int, rule: InputRule = WEIGHT_ONLY, bias: torch.Tensor | None = None
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (num_rows, WIDTH), generator=generator).to(torch.int8)
    scale = torch.rand(num_rows, 1, generator=generator) + 0.5
    return QuantizedWeight(codes, scale, None, (1, WIDTH), INT8, rule, bias=bias)


@pytest.fixture
def method():
    from sglang_ascend.plugin.quantization.linear import QuantizedLinear

    return QuantizedLinear("model.layers.0.self_attn.qkv_proj")


def loaded(method, parts: dict, sizes: list[int], width: int = WIDTH) -> torch.nn.Module:
    layer = torch.nn.Module()
    method.create_weights(layer, width, sizes, WIDTH, sum(sizes), torch.float32)
    for shard, tensor in parts.items():
        layer.weight.weight_loader(layer.weight, tensor, *(() if shard is None else (shard,)))
    method.process_weights_after_loading(layer)
    return layer


def inputs(num_rows: int = 3, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(9))


def qkv_weights() -> dict[str, QuantizedWeight]:
    sizes = zip("qkv", QKV_SIZES, strict=True)
    return {name: weight_of(size, seed) for seed, (name, size) in enumerate(sizes)}


def test_parts_stand_in_the_order_of_the_outputs_whenever_they_come(method):
    weights = qkv_weights()
    layer = loaded(method, {name: to_rows(weights[name]) for name in "vqk"}, QKV_SIZES)
    x = inputs()
    expected = x @ torch.cat([weights[name].dequantize() for name in "qkv"]).T
    assert_close(method.apply(layer, x), expected, rtol=1e-5, atol=1e-3)
    in_order_of_arrival = x @ torch.cat([weights[name].dequantize() for name in "vqk"]).T
    assert not torch.allclose(method.apply(layer, x), in_order_of_arrival, rtol=0.1)


def test_rows_that_sglang_has_joined_are_one_weight(method):
    first, second = weight_of(8, 0), weight_of(4, 1)
    layer = loaded(method, {None: torch.cat([to_rows(first), to_rows(second)])}, [12])
    x = inputs()
    expected = x @ torch.cat([first.dequantize(), second.dequantize()]).T
    assert_close(method.apply(layer, x), expected, rtol=1e-5, atol=1e-3)


def test_a_float_part_beside_quantized_ones_makes_the_layer_float_and_says_so(method, caplog):
    weights = qkv_weights()
    parts = {name: to_rows(weight) for name, weight in weights.items()}
    parts["k"] = weights["k"].dequantize()
    layer = loaded(method, parts, QKV_SIZES)
    x = inputs()
    expected = x @ torch.cat([weight.dequantize() for weight in weights.values()]).T
    assert_close(method.apply(layer, x), expected, rtol=1e-5, atol=1e-3)
    assert "joins float and quantized weights" in caplog.text


def test_a_bias_that_is_folded_into_the_integers_counts_once(method):
    """msModelSlim's static W8A8 stores the bias in quant_bias, and as a tensor."""
    bias = 50 * torch.randn(8, generator=torch.Generator().manual_seed(3))
    rule = InputRule(InputKind.STATIC, scale=2.0**-6, offset=-5.0)
    weight = weight_of(8, 0, rule, bias)
    layer = loaded(method, {None: to_rows(weight)}, [8])
    x = inputs().clamp(-1.9, 2.0)
    rounded = (x / rule.scale).round() * rule.scale
    exact = rounded @ weight.dequantize().T
    unit = float(weight.scale.max()) * rule.scale  # the folded bias is rounded to an integer
    found = method.apply(layer, x, bias)
    assert_close(found, exact + bias, rtol=1e-5, atol=unit)
    assert not torch.allclose(found, exact + 2 * bias, rtol=1e-5, atol=unit)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_slices_of_outputs_and_inputs_are_the_whole(num_ranks):
    from sglang_ascend.plugin.quantization.linear import slice_of_rank

    weight = weight_of(8, 0)
    rows, whole = to_rows(weight), weight.dequantize()
    ranks = [(rank, num_ranks) for rank in range(num_ranks)]
    outputs = [
        slice_of_rank("o_proj", rows, 8 // num_ranks, WIDTH, rank).dequantize() for rank in ranks
    ]
    assert_close(torch.cat(outputs), whole, rtol=0, atol=0)
    inputs = [
        slice_of_rank("o_proj", rows, 8, WIDTH // num_ranks, rank).dequantize() for rank in ranks
    ]
    assert_close(torch.cat(inputs, dim=1), whole, rtol=0, atol=0)
    dense = [slice_of_rank("o_proj", whole, 8, WIDTH // num_ranks, rank) for rank in ranks]
    assert_close(torch.cat(dense, dim=1), whole, rtol=0, atol=0)


def test_ranks_beyond_the_key_heads_share_them():
    from sglang_ascend.plugin.quantization.linear import slice_of_rank

    weight = weight_of(8, 0)
    found = [
        slice_of_rank("o_proj", to_rows(weight), 4, WIDTH, (rank, 4)).dequantize()
        for rank in range(4)
    ]
    first, second = weight.dequantize().split(4)
    for part, expected in zip(found, (first, first, second, second), strict=True):
        assert_close(part, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(6, WIDTH), (16, WIDTH), (8, 5), (2, WIDTH)])
def test_a_weight_of_another_shape_is_refused(num_rows, num_columns):
    from sglang_ascend.plugin.quantization.linear import slice_of_rank

    with pytest.raises(ValueError, match=r"o_proj has .* on each of 2 ranks"):
        slice_of_rank("o_proj", to_rows(weight_of(8, 0)), num_rows, num_columns, (0, 2))


def test_a_missing_part_stops_the_start(method):
    weights = qkv_weights()
    with pytest.raises(ValueError, match="only; the checkpoint lacks a part of it"):
        loaded(method, {name: to_rows(weights[name]) for name in "qk"}, QKV_SIZES)


def test_no_weight_at_all_stops_the_start(method):
    with pytest.raises(ValueError, match="got no weight"):
        loaded(method, {}, QKV_SIZES)
