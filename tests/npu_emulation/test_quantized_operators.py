"""Our quantized products on the emulated NPU are what loops over decoded numbers say.

Called through the real torch_npu. An offset of the other sign, int4 in another order or an input
quantized otherwise is caught.
"""

from __future__ import annotations

import pytest
import torch

from npu_emulation.goldens import moe
from npu_emulation.goldens import quantized as goldens
from npu_emulation.goldens.registry import GOLDENS
from sglang_ascend.ops import quantized
from sglang_ascend.ops.dispatch import REFERENCE
from sglang_ascend.ops.npu import CheckedCalls
from sglang_ascend.ops.quantized import npu
from sglang_ascend.quantization.formats import INT8
from sglang_ascend.quantization.product import held, prepare, prepare_grouped
from sglang_ascend.quantization.weight import PER_TOKEN, WEIGHT_ONLY, QuantizedWeight

ROWS, OUT, WIDTH, GROUP = 5, 16, 128, 32


def codes(*shape: int, bits: int = 8) -> torch.Tensor:
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).to(torch.int8)


def in_bf16(*shape: int) -> torch.Tensor:
    """float32 that bfloat16 holds: the device takes scales in the input's dtype."""
    return (0.01 + torch.rand(shape)).bfloat16().float()


def agrees(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """One rounding to bfloat16, of a sum in float32."""
    scale = exact.abs().max()
    difference = (found.cpu().double() - exact).abs()
    return bool((difference <= 2**-8 * exact.abs() + 1e-5 * scale).all())


def weight_only_agrees(bits: int, group: int, with_zero: bool) -> bool:
    matrix, groups = codes(OUT, WIDTH, bits=bits), WIDTH // group
    scale, x = in_bf16(OUT, groups), torch.randn(ROWS, WIDTH).bfloat16()
    zero = codes(OUT, groups, bits=bits).float() if with_zero else None
    bias = torch.randn(OUT).bfloat16()
    given = [value if value is None else value.to("npu") for value in (matrix, scale, zero)]
    with CheckedCalls():
        weight = quantized.prepare_weight_only(*given, bits=bits, group_size=group)
        found = quantized.weight_only_linear(x.to("npu"), weight, bias.to("npu"))
    offset = torch.zeros(OUT, groups) if zero is None else zero
    exact = bias.double().repeat(ROWS, 1)
    for column in range(WIDTH):
        of_group = column // group
        values = (matrix[:, column].double() - offset[:, of_group]) * scale[:, of_group].double()
        exact += x[:, column, None].double() * values
    return agrees(found, exact)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [WIDTH, GROUP])
@pytest.mark.parametrize("with_zero", [False, True])
def test_weights_alone_are_decoded_with_their_zeros(numerics, bits, group, with_zero):
    assert weight_only_agrees(bits, group, with_zero)


def test_an_offset_that_is_subtracted_is_caught(numerics, monkeypatch):
    right = goldens.weight_quant_batchmatmul

    def subtracting(x, weight, antiquant_scale, antiquant_offset, bias, antiquant_group_size):
        offset = -antiquant_offset
        return right(x, weight, antiquant_scale, offset, bias, antiquant_group_size)

    monkeypatch.setitem(GOLDENS, "npu::npu_weight_quant_batchmatmul", subtracting)
    assert not weight_only_agrees(4, GROUP, True)


def test_int4_packed_the_other_way_round_is_caught(numerics, monkeypatch):
    def reversed_order(weight):
        return goldens.convert_weight_to_int4pack(
            weight.unflatten(-1, (-1, 8)).flip(-1).flatten(-2)
        )

    monkeypatch.setitem(GOLDENS, "npu::npu_convert_weight_to_int4pack", reversed_order)
    assert not weight_only_agrees(4, GROUP, False)


def exact_integers(x: torch.Tensor, matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Row by row in float64, from the codes of the definition."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    q = (x.float() / step).round().long()
    return (q @ matrix.long().T).double() * scale[:, 0].double() * step.double()


def test_integers_are_multiplied_and_scaled_by_row_and_channel(numerics):
    x, matrix, scale = torch.randn(ROWS, WIDTH).bfloat16(), codes(OUT, WIDTH), in_bf16(OUT, 1)
    with CheckedCalls():
        weight = quantized.prepare_integer(matrix.to("npu"), scale.to("npu"))
        found = quantized.integer_linear(x.to("npu"), weight)
    assert agrees(found, exact_integers(x, matrix, scale))
    assert not agrees(found, exact_integers(x, matrix, scale.roll(1, 0)))


def test_the_static_form_adds_its_bias_to_the_integers(numerics):
    x, matrix, scale = torch.randn(ROWS, WIDTH).bfloat16(), codes(OUT, WIDTH), in_bf16(OUT, 1)
    bias = torch.randint(-9999, 9999, (OUT,), dtype=torch.int32)
    static = {"input_scale": torch.tensor([0.03125]), "input_offset": torch.tensor([7.0])}
    static |= {"quant_bias": bias}
    on_device = {name: value.to("npu") for name, value in static.items()}
    with CheckedCalls():
        weight = quantized.prepare_integer(matrix.to("npu"), scale.to("npu"), **on_device)
        found = quantized.integer_linear(x.to("npu"), weight)
    q = (x.float() * 32 + 7).round().clamp(-128, 127).long()
    total = q @ matrix.long().T
    assert agrees(found, (total + bias).double() * scale[:, 0].double())
    assert not agrees(found, total.double() * scale[:, 0].double())


def test_the_rows_of_each_expert_meet_its_own_matrix(numerics):
    counts = torch.tensor([2, 0, 3])
    x, matrix, scale = torch.randn(5, WIDTH).bfloat16(), codes(3, OUT, WIDTH), in_bf16(3, OUT, 1)
    with CheckedCalls():
        weight = quantized.prepare_integer(matrix.to("npu"), scale.to("npu"))
        found = quantized.grouped_integer_linear(x.to("npu"), weight, counts.to("npu"))
    groups = zip(x.split(counts.tolist()), matrix, scale, strict=True)
    exact = torch.cat([exact_integers(*group) for group in groups])
    assert agrees(found, exact) and not agrees(found, exact.flip(0))


def grouped_int4_agrees() -> bool:
    counts = torch.tensor([2, 0, 3])
    x, scale = torch.randn(5, WIDTH).bfloat16(), in_bf16(3, OUT, 1)
    matrix = codes(3, OUT, WIDTH, bits=4)
    with CheckedCalls():
        weight = quantized.prepare_integer(matrix.to("npu"), scale.to("npu"), bits=4)
        found = quantized.grouped_integer_linear(x.to("npu"), weight, counts.to("npu"))
    assert weight.packed.codes.dtype == torch.int32
    groups = zip(x.split(counts.tolist()), matrix, scale, strict=True)
    return agrees(found, torch.cat([exact_integers(*group) for group in groups]))


def test_packed_int4_of_experts_meet_int8_rows(numerics):
    assert grouped_int4_agrees()


def test_rows_from_which_8_is_not_taken_are_caught(numerics, monkeypatch):
    right = GOLDENS["npu::npu_grouped_matmul"]

    def unshifted(
        x, weight, bias, scale, per_token_scale, group_list, split_item, group_type,
        group_list_type, output_dtype,
    ):  # fmt: skip
        """The bias joins a product of x itself."""
        steps = [moe._scales(scale[0])[:, 0].float()]
        options = (group_list, split_item, group_type, group_list_type, output_dtype)
        weight, bias = [goldens.integers(weight[0]).to(torch.int8)], [bias[0] / steps[0]]
        return right(x, weight, bias, steps, per_token_scale, None, None, *options)

    monkeypatch.setitem(GOLDENS, "npu::npu_grouped_matmul", unshifted)
    assert not grouped_int4_agrees()


@pytest.mark.parametrize(("bits", "group"), [(8, WIDTH), (4, WIDTH), (4, GROUP)])
def test_the_decoded_weights_of_each_expert_meet_its_rows(numerics, bits, group):
    counts = torch.tensor([2, 0, 3])
    matrix, scale = codes(3, OUT, WIDTH, bits=bits), in_bf16(3, OUT, WIDTH // group)
    x, zero = torch.randn(5, WIDTH).bfloat16(), codes(3, OUT, WIDTH // group, bits=bits).float()
    given = [value.to("npu") for value in (matrix, scale, zero)]
    with CheckedCalls():
        weight = quantized.prepare_weight_only(*given, bits=bits, group_size=group)
        found = quantized.grouped_weight_only_linear(x.to("npu"), weight, counts.to("npu"))
    of_group = torch.arange(WIDTH) // group
    values = (matrix.double() - zero.double()[..., of_group]) * scale.double()[..., of_group]
    groups = zip(x.double().split(counts.tolist()), values, strict=True)
    exact = torch.cat([rows @ of_expert.T for rows, of_expert in groups])
    assert agrees(found, exact) and not agrees(found, exact.flip(0))


def test_the_activation_that_quantizes_rounds_once(numerics):
    gate_up = torch.randn(ROWS, 2 * WIDTH).bfloat16()
    found, step = torch.ops.npu.npu_dequant_swiglu_quant(
        gate_up.to("npu"), quant_mode=1, activate_left=True
    )
    gate, up = gate_up.double().chunk(2, 1)
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(step.cpu().double(), exact.abs().amax(1) / 127, rtol=1e-5, atol=0)
    assert ((found.cpu() - exact / step.cpu()[:, None]).abs() <= 0.5 + 1e-3).all()


def test_what_has_no_fused_product_is_multiplied_as_floats(numerics):
    """Where a step is captured; a definition would read counts on the host."""
    matrix, scale = codes(OUT, WIDTH), in_bf16(OUT, WIDTH // GROUP)
    x = torch.randn(ROWS, WIDTH).bfloat16()
    weight = QuantizedWeight(matrix, scale, None, (1, GROUP), INT8, PER_TOKEN)
    on_device = weight.to(torch.device("npu"))
    found = prepare(on_device, torch.bfloat16, needs_body=True)(x.to("npu"))
    values = weight.dequantize().bfloat16().double()
    assert agrees(found, x.double() @ values.T)
    grouped = prepare_grouped([on_device] * 3, torch.bfloat16, needs_body=True)
    counts = torch.tensor([2, 0, 3], device="npu")
    assert agrees(grouped(x.to("npu"), counts), x.double() @ values.T)


@pytest.mark.parametrize("rule", [PER_TOKEN, WEIGHT_ONLY])
@pytest.mark.parametrize(("num_rows", "is_float"), [(65535, False), (65536, True)])
def test_a_head_of_more_rows_than_a_product_takes_is_multiplied_as_floats(
    numerics, rule, num_rows, is_float
):
    matrix, scale = codes(num_rows, GROUP), in_bf16(num_rows, 1)
    x = torch.randn(ROWS, GROUP).bfloat16()
    weight = QuantizedWeight(matrix, scale, None, (1, GROUP), INT8, rule)
    with CheckedCalls():
        on_device = weight.to(torch.device("npu"))
        found = prepare(on_device, torch.bfloat16, needs_body=True)(x.to("npu"))
    values = weight.dequantize()
    exact = x.double() @ (values.bfloat16() if is_float else values).double().T
    if rule is PER_TOKEN and not is_float:
        exact = exact_integers(x, matrix, scale)
    assert agrees(found, exact)
    meta = held(weight.to(torch.device("meta")), torch.bfloat16, needs_body=True)
    assert meta.is_float == is_float


def test_what_the_device_cannot_take_is_left_to_the_reference():
    x = torch.randn(ROWS, WIDTH)
    prepare_integer = quantized.prepare_integer.implementation(REFERENCE)
    int8 = prepare_integer(codes(OUT, WIDTH), in_bf16(OUT, 1))
    int4 = prepare_integer(codes(OUT, WIDTH, bits=4), in_bf16(OUT, 1), bits=4)
    groups = in_bf16(OUT, WIDTH // GROUP)
    in_groups = prepare_integer(codes(OUT, WIDTH), groups, group_size=GROUP)
    assert npu.accepts_integer(x.bfloat16(), int8) and npu.accepts_groups(x.half(), int8, x)
    assert not npu.accepts_integer(x, int8)
    assert not npu.accepts_integer(x.bfloat16(), int4)
    assert not npu.accepts_integer(x.bfloat16(), in_groups)
    ragged = quantized.prepare_weight_only(codes(OUT, 88), in_bf16(OUT, 3), group_size=GROUP)
    assert not npu.accepts_weight_only(x.bfloat16(), ragged)
