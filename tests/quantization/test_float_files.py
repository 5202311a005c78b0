"""Formats that no operator multiplies: files, rows and products mean the same numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.quantization.formats import HIF4, HIF8, MXFP8, NF4
from sglang_ascend.quantization.layouts.base import ModuleTensors
from sglang_ascend.quantization.layouts.floats import SCHEMES, read_codes, read_scale, tensors_of
from sglang_ascend.quantization.product import AS_FLOATS, cpu_body, prepare, prepare_grouped
from sglang_ascend.quantization.recipe import parse_recipe
from sglang_ascend.quantization.rows import from_rows, to_rows
from sglang_ascend.quantization.solve import Grid, rtn
from sglang_ascend.quantization.weight import QuantizedWeight
from sglang_ascend.quantization.writers.compressed_tensors import CompressedTensorsWriter
from sglang_ascend.quantization.writers.modelslim import ModelSlimWriter

BLOCKS = {HIF8: (1, None), NF4: (1, 16), HIF4: (1, 4)}
RECIPE = """
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {scope: ACT, dtype: DTYPE}
        weight: {scope: WEIGHT, dtype: DTYPE}
      exclude: ["*kv_b_proj"]
"""


def drawn(name: str, columns: int = 128, rows: int = 12) -> QuantizedWeight:
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 3, rows)[:, None]
    weight[3] = 0
    assert scheme.input_rule is not None
    block = BLOCKS.get(scheme.number_format, (1, 32))
    return rtn(weight, Grid(scheme.number_format, block), scheme.input_rule)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_file_holds_the_same_numbers_in_as_few_bytes_as_it_can(name):
    weight = drawn(name)
    tensors = tensors_of(weight)
    assert sum(tensor.nbytes for tensor in tensors.values()) == weight.num_bytes
    held = ModuleTensors("a", tensors)
    codes = read_codes(held, weight.number_format)
    scale = read_scale(held, weight.number_format, codes.shape)
    assert torch.equal(codes.view(torch.uint8), weight.codes.view(torch.uint8))
    assert torch.equal(scale, weight.scale)
    swapped = ModuleTensors("a", tensors | {"weight": tensors["weight"].roll(1, 1)})  # the control
    other = read_codes(swapped, weight.number_format)
    assert not torch.equal(other.view(torch.uint8), weight.codes.view(torch.uint8))


@pytest.mark.parametrize("form", [MXFP8, HIF4], ids=lambda form: form.name)
def test_a_scale_that_is_no_number_is_refused(form):
    weight = drawn("W8A16_MXFP8" if form is MXFP8 else "W4A16_HIF4")
    tensors = tensors_of(weight)
    tensors["weight_scale"][2, 1] = 0xFF if form is MXFP8 else -1
    with pytest.raises(CheckpointError, match="a scale that is not a finite number above 0"):
        read_scale(ModuleTensors("a", tensors), form, weight.codes.shape)


def test_a_code_of_hifloat8_that_is_no_number_is_refused():
    weight = drawn("W8A16_HIF8")
    for code in (0x80, 0x6F, 0xEF):
        weight.codes[1, 2] = code
        with pytest.raises(CheckpointError, match="holds codes that are no hif8"):
            read_codes(ModuleTensors("a", tensors_of(weight)), HIF8)


def rounded(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """Inputs after the weight's rule; the encoding itself is test_formats' matter."""
    rule = weight.input_rule
    if rule.kind == "none":
        return x
    form, result = rule.number_format, np.zeros_like(x)
    if form is HIF4:
        one = rtn(torch.tensor(x), Grid(HIF4, (1, 4)))
        return one.dequantize().double().numpy()
    size = form.group_size or x.shape[1]
    for row in range(len(x)):
        for start in range(0, x.shape[1], size):
            part = x[row, start : start + size]
            largest = np.abs(part).max()
            exponent = {"mxfp8": 8, "mxfp4": 2}.get(form.name)
            scale = np.float32(largest / 15)
            if exponent is not None:
                scale = 2.0 ** (np.floor(np.log2(largest)) - exponent)
            codes = form.encode(torch.tensor(np.float32(part) / np.float32(scale)))
            result[row, start : start + size] = form.decode(codes).double().numpy() * scale
    return result


@pytest.mark.parametrize("name", SCHEMES)
def test_a_product_rounds_inputs_and_multiplies_the_numbers(name):
    weight = drawn(name)
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(5, 128, generator=generator), torch.randn(12, generator=generator)
    values = weight.dequantize().double().numpy()
    expected = rounded(x.double().numpy(), weight) @ values.T
    size = np.abs(values).sum(1) + 1
    found = prepare(weight)(x, bias).double().numpy() - bias.numpy()
    assert (np.abs(found - expected) / size).max() < 1e-5
    if weight.input_rule.kind != "none":  # the control: inputs as they are
        assert (np.abs(x.numpy() @ values.T - expected) / size).max() > 1e-4
    grouped = prepare_grouped([weight, weight], torch.float32)(x, torch.tensor([2, 3]))
    assert (np.abs(grouped.double().numpy() - expected) / size).max() < 1e-5
    assert cpu_body(weight, is_expert=True) == AS_FLOATS
    sent = from_rows(torch.cat([to_rows(weight.rows(0, 5)), to_rows(weight.rows(5, 12))]))
    assert torch.equal(sent.dequantize(), weight.dequantize())
    assert sent.input_rule == weight.input_rule


def test_formats_go_with_the_inputs_that_their_types_have():
    for dtype, act in (
        ("nf4", "int8"),
        ("mxfp8", "int8"),
        ("int4", "hif8"),
        ("mxfp8_e5m2", "mxfp8"),
    ):
        scope = "per_block" if dtype.startswith("mx") else "per_channel"
        text = RECIPE.replace("DTYPE", act, 1).replace("DTYPE", dtype).replace("WEIGHT", scope)
        text = text.replace("ACT", "per_block" if act.startswith("mx") else "per_token")
        with pytest.raises(ValueError, match=f"act of {dtype} weights is no inputs"):
            parse_recipe(text, "wrong")


def test_what_a_file_cannot_hold_is_refused():
    with pytest.raises(CheckpointError, match="nf4 weights, which compressed-tensors cannot hold"):
        CompressedTensorsWriter().write("a", drawn("W4A16_NF4"))
    with pytest.raises(CheckpointError, match="columns that 64 does not divide"):
        ModelSlimWriter().write("a", drawn("W4A16_HIF4", columns=96))
    with pytest.raises(CheckpointError, match="hif8 with per_token mxfp8 input"):
        ModelSlimWriter().write(
            "a", replace(drawn("W8A16_HIF8"), input_rule=drawn("W8A8_MXFP8").input_rule)
        )
