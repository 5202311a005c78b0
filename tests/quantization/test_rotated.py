"""Rotated inputs: files, rows and products mean the numbers of the weight that was turned.

The oracle multiplies by the whole matrix of ``packers``, in float64.
"""

from dataclasses import replace

import numpy as np
import packers
import pytest
import torch

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.quantization.formats import INT4, INT8
from sglang_ascend.quantization.layouts.base import ModuleTensors
from sglang_ascend.quantization.layouts.modelslim import SCHEMES, ModelSlim
from sglang_ascend.quantization.product import AS_FLOATS, cpu_body, prepare, prepare_grouped
from sglang_ascend.quantization.recipe import RecipeError, parse_recipe, read_recipe
from sglang_ascend.quantization.rows import from_rows, to_rows
from sglang_ascend.quantization.solve import Grid, rtn
from sglang_ascend.quantization.transforms.rotation import rotated
from sglang_ascend.quantization.weight import InputKind, InputRule, QuantizedWeight
from sglang_ascend.quantization.writers.compressed_tensors import CompressedTensorsWriter
from sglang_ascend.quantization.writers.float32 import Float32Writer
from sglang_ascend.quantization.writers.modelslim import ModelSlimWriter

FORMS = {"W8A8_DYNAMIC": INT8, "W4A4_DYNAMIC": INT4}
WIDTH = 96


def drawn(name: str) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight of ModelSlim's type `name`, and the float one that was rounded."""
    form, turns = FORMS[name.removesuffix("_ROTATED")], name.endswith("_ROTATED")
    weight = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0))
    rule = InputRule(InputKind.PER_TOKEN, form, rotated=turns)
    return rtn(rotated(weight) if turns else weight, Grid(form), rule), weight


def inputs() -> torch.Tensor:
    """With one channel that is much larger than the others."""
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    x[:, 7] *= 50
    return x


def exact(weight: QuantizedWeight, x: torch.Tensor, turn: np.ndarray) -> np.ndarray:
    """float64: round(x R / step) step (codes scale)^T, value by value."""
    largest = {8: 127, 4: 7}[weight.number_format.bits]
    turned = x.double().numpy() @ turn
    step = np.abs(turned).max(1, keepdims=True) / largest
    factor = weight.codes.double().numpy() * weight.scale.double().numpy()
    return np.round(turned / step) * step @ factor.T


NAMES = [name + suffix for name in FORMS for suffix in ("", "_ROTATED")]


@pytest.mark.parametrize("name", NAMES)
def test_a_product_rounds_the_rotated_inputs(name):
    weight, floats = drawn(name)
    x, bias = inputs(), torch.randn(12, generator=torch.Generator().manual_seed(2))
    turn = packers.rotation(WIDTH) if weight.input_rule.rotated else np.eye(WIDTH)
    expected = exact(weight, x, turn)
    size = np.abs(expected).max()
    found = prepare(weight)(x, bias).double().numpy() - bias.numpy()
    assert np.abs(found - expected).max() < 1e-5 * size
    grouped = prepare_grouped([weight, weight], torch.float32)(x, torch.tensor([2, 3]))
    assert np.abs(grouped.double().numpy() - expected).max() < 1e-5 * size
    other = replace(
        weight, input_rule=replace(weight.input_rule, rotated=not weight.input_rule.rotated)
    )
    assert np.abs(prepare(other)(x).numpy() - expected).max() > 0.1 * size  # the control
    error = float((weight.dequantize() - floats).norm() / floats.norm())
    assert error < (0.01 if weight.number_format is INT8 else 0.16)
    is_exact = cpu_body(weight, is_expert=False) != AS_FLOATS
    assert is_exact == (weight.number_format is INT8)


def test_rotation_errs_less_where_a_channel_is_large():
    errors = {}
    for name in NAMES:
        weight, floats = drawn(name)
        wanted = inputs().double() @ floats.double().T
        errors[name] = float((prepare(weight)(inputs()) - wanted).norm() / wanted.norm())
    for name in FORMS:
        assert errors[f"{name}_ROTATED"] < 0.5 * errors[name]


@pytest.mark.parametrize("name", NAMES)
def test_files_and_rows_hold_it(name):
    weight = drawn(name)[0]
    writer = ModelSlimWriter()
    tensors = writer.write("a", weight)
    description = writer.files()["quant_model_description.json"]
    assert description["a.weight"] == name and description["model_quant_type"] == name
    layout = ModelSlim({}, description, "a")
    found = layout._read_channel(
        ModuleTensors("a", tensors), tensors["weight"], SCHEMES[description["a.weight"]]
    )
    sent = from_rows(torch.cat([to_rows(found.rows(0, 5)), to_rows(found.rows(5, 12))]))
    for one in (found, sent):
        assert one.input_rule == weight.input_rule
        assert torch.equal(one.dequantize(), weight.dequantize())
    # What other tools read is the weight itself.
    assert torch.equal(Float32Writer().write("a", weight)["weight"], weight.dequantize())


def test_what_mixes_or_cannot_say_a_rotation_is_refused():
    weight, plain = drawn("W8A8_DYNAMIC_ROTATED")[0], drawn("W8A8_DYNAMIC")[0]
    with pytest.raises(ValueError, match="cut into parts: serve with --tp-size 1"):
        weight.columns(0, WIDTH // 2)
    assert weight.columns(0, WIDTH).input_rule.rotated
    with pytest.raises(CheckpointError, match="rotated inputs, which compressed-tensors cannot"):
        CompressedTensorsWriter().write("a", weight)
    with pytest.raises(ValueError, match="input rule"):
        from_rows(torch.cat([to_rows(weight), to_rows(plain)]))
    int4 = replace(weight, number_format=INT4, codes=weight.codes.clamp(-8, 7))
    with pytest.raises(CheckpointError, match="int4 with per_token int8 input, rotated"):
        ModelSlimWriter().write("a", int4)
    with pytest.raises(ValueError, match="only inputs that are scaled per token"):
        InputRule(rotated=True)


RECIPE = """
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {scope: per_token, dtype: ACT, ext: {rotation: true}}
        weight: {scope: per_channel, dtype: int8}
"""


def test_a_recipe_rotates_integers_and_smooths_or_rotates():
    scheme = read_recipe("w4a4").scheme("model.layers.1.mlp.experts.3.up_proj")
    assert scheme is not None and scheme.name == "W4A4 rotated"
    smooth = RECIPE.replace("process:", "process:\n    - type: flex_smooth_quant")
    wrong = {
        "smoothed inputs are not rotated too": smooth.replace("ACT", "int8"),
        "rotation is of int8 and int4 inputs": RECIPE.replace("ACT", "hif8"),
        "act of int8 weights is no inputs or int8, not int4": RECIPE.replace("ACT", "int4"),
        "rotation goes without max_error": RECIPE.replace("ACT", "int8").replace(
            "true}", "true, max_error: 0.1}"
        ),
        "rotation is an ext of act": RECIPE.replace("ACT", "int8").replace(
            "int8}", "int8, ext: {rotation: true}}"
        ),
    }
    for reason, text in wrong.items():
        with pytest.raises(RecipeError, match=reason):
            parse_recipe(text, "wrong")
