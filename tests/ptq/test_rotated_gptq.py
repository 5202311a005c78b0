"""GPTQ of a rotated weight answers for the inputs in the basis in which it is rounded."""

import pytest
import torch
from torch import nn

from sglang_ascend.ptq.calibration import quantize_linear
from sglang_ascend.quantization.recipe import read_recipe

ROWS, WIDTH = 512, 96


def error(recipe: str, linear: nn.Linear, seen: torch.Tensor, held_out: torch.Tensor) -> float:
    """Of the outputs, by the weights alone."""
    scheme = read_recipe(recipe).scheme("model.layers.0.mlp.down_proj")
    assert scheme is not None
    moved = quantize_linear(linear, scheme, seen).dequantize() - linear.weight
    return float((held_out.double() @ moved.double().T).square().sum())


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_rotated_codes_by_gptq_move_the_outputs_less_than_the_nearest(seed):
    """Of inputs that lie near a few directions; the control: of inputs of other channels."""
    torch.manual_seed(seed)
    linear, directions = nn.Linear(WIDTH, 40, bias=False), torch.randn(12, WIDTH)
    seen, held_out = (
        torch.randn(ROWS, 12) @ directions + 0.1 * torch.randn(ROWS, WIDTH) for _ in range(2)
    )
    nearest = error("w8a8-rotated", linear, seen, held_out)
    assert error("w8a8-rotated-gptq", linear, seen, held_out) < 0.5 * nearest
    others = seen[:, torch.randperm(WIDTH)]
    assert error("w8a8-rotated-gptq", linear, others, held_out) > 0.8 * nearest
