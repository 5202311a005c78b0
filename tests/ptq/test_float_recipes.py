"""Recipes in the formats that no operator multiplies, from nano-deepseek to files and figures."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.ptq.evaluate import evaluate
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.ptq.report import figures
from sglang_ascend.ptq.text import replies_to
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.formats import INT8
from sglang_ascend.quantization.recipe import parse_recipe, read_recipe
from sglang_ascend.quantization.weight import PER_TOKEN
from sglang_ascend.training.targets.families import Target

DATA = Path(__file__).parents[1] / "data"
RECIPE = """
spec:
  process:
    - type: linear_quant
      qconfig:
        act: {scope: ACT, dtype: DTYPE}
        weight: {scope: WEIGHT, dtype: DTYPE}
      exclude: ["*kv_b_proj"]
"""


@pytest.mark.parametrize(
    ("dtype", "weight", "act", "type_name"),
    [
        ("hif8", "per_channel", "per_token", "W8A8_HIF8"),
        ("mxfp8", "per_block", "per_block", "W8A8_MXFP8"),
        ("mxfp4", "per_block", "per_block", "W4A4_MXFP4"),
        ("hif4", "per_block", "per_block", "W4A4_HIF4"),
    ],
)
def test_a_recipe_writes_them_and_what_it_writes_is_read(
    dtype, weight, act, type_name, nano, tmp_path
):
    text = RECIPE.replace("ACT", act).replace("WEIGHT", weight).replace("DTYPE", dtype)
    Quantization(nano, parse_recipe(text, dtype), tmp_path / "out").run()
    found = Checkpoint.open(tmp_path / "out")
    floats = Checkpoint.open(nano)
    assert {scheme.name for scheme in found.schemes.values()} <= {type_name, "W8A8_DYNAMIC"}
    assert type_name in {scheme.name for scheme in found.schemes.values()}
    for module, scheme in found.schemes.items():
        held, values = found.weight(module), floats.tensor(f"{module}.weight").float()
        error = (held.dequantize() - values).norm() / values.norm()
        assert error < (0.2 if scheme.number_format.bits == 4 else 0.05)
    name = next(m for m, scheme in found.schemes.items() if scheme.name == type_name)
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "out", damaged)
    path = next(damaged.glob("*.safetensors"))
    tensors = load_file(path)
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="should be"):
        Checkpoint.open(damaged).weight(name)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hifloat8_is_on_par_with_fp8(nano, tmp_path):
    """Weights and inputs of the same linears, on held-out prompts; the ratio is paired."""
    text = RECIPE.replace("ACT", "per_token").replace("WEIGHT", "per_channel")
    text = text.replace('exclude: ["*kv_b_proj"]', 'include: ["*"]').replace("DTYPE", "hif8")
    Quantization(nano, parse_recipe(text, "hif8"), tmp_path / "hif8").run()
    Quantization(nano, read_recipe("fp8"), tmp_path / "fp8").run()
    prompts = [DATA / name for name in ("heldout_maths.json", "heldout_nano_chat.json")]
    texts = replies_to(Target.open(nano), prompts, 64, 24)
    report = figures(evaluate([tmp_path / "hif8", tmp_path / "fp8"], nano, texts))
    for checkpoint in report["checkpoints"]:
        found = checkpoint["domains"]["all"]
        print(checkpoint["folder"], found["kl"], found["kl_to_last"], found["acceptance_length"])
    assert report["checkpoints"][1]["domains"]["all"]["kl_to_last"]["value"] <= 1.1


NUM_EXPERTS = 8
METHODS = """
spec:
  process:
    - type: linear_quant
      qconfig:
        weight:
          {scope: per_group, dtype: int4, symmetric: false, method: METHOD, ext: {group_size: 32}}
      include: ["model.layers.1.mlp.experts.*.up_proj"]
"""


def test_a_recipe_s_method_is_what_solves_the_weight(nano, tmp_path):
    """Codes differ from those of rounding; and only the calibrated method depends on the seed."""

    def of_experts(folder: Path) -> torch.Tensor:
        """Of all of them: two texts reach some too seldom to tell the seeds apart."""
        checkpoint = Checkpoint.open(folder)
        names = (f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(NUM_EXPERTS))
        return torch.stack([checkpoint.weight(name).dequantize() for name in names])

    found = {}
    for method in ("minmax", "mse", "lwc", "hqq", "qoq"):
        recipe = parse_recipe(METHODS.replace("METHOD", method), method)
        for seed in (0, 1):
            out = tmp_path / f"{method}-{seed}"
            Quantization(nano, recipe, out, seed, num_texts=2).run()
            found[method, seed] = of_experts(out)
    for method in ("mse", "lwc", "hqq", "qoq"):
        differs = (found[method, 0] != found["minmax", 0]).flatten(1).any(1)
        # An expert that no calibration token reached is rounded by lwc.
        assert differs.any() if method == "lwc" else differs.all(), method
        assert torch.equal(found[method, 0], found[method, 1]) == (method != "lwc"), method
    text = METHODS.replace("qconfig:", "qconfig:\n        act: {scope: per_token, dtype: int8}")
    Quantization(nano, parse_recipe(text.replace("METHOD", "qoq"), "q"), tmp_path / "w4a8").run()
    expanded = Checkpoint.open(tmp_path / "w4a8").weight("model.layers.1.mlp.experts.3.up_proj")
    assert expanded.number_format is INT8 and expanded.input_rule == PER_TOKEN
    assert (of_experts(tmp_path / "w4a8") - found["qoq", 0]).abs().max() < 1e-6
