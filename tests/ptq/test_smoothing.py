"""FlexSmoothQuant: folding changes no output, saved scales give the same bytes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import write_target

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.ptq.calibration import walked
from sglang_ascend.ptq.folding import side_file
from sglang_ascend.ptq.folding.smooth import folded, smoothings
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import sha256
from sglang_ascend.quantization.recipe import (
    BUILT_IN,
    Recipe,
    RecipeError,
    parse_recipe,
    read_recipe,
)
from sglang_ascend.quantization.transforms.smoothing import search, smoothing_scale
from sglang_ascend.training.export import export
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.packs import packed
from sglang_ascend.training.targets.quantized import linears
from sglang_ascend.training.targets.start import new_layer

FLEX = read_recipe("w8a8-flex")
STATIC = """
spec:
  process:
    - {type: flex_smooth_quant}
    - type: linear_quant
      qconfig:
        act: {scope: per_tensor, dtype: int8, symmetric: false}
        weight: {scope: per_channel, dtype: int8}
"""


def rounded(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


def rounded_inputs(values: torch.Tensor, _scale: torch.Tensor) -> torch.Tensor:
    return rounded(values)


def uneven(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with one channel that is a hundred times larger than the others, and weights."""
    generator = torch.Generator().manual_seed(seed)
    inputs, weight = (torch.randn(rows, 32, generator=generator) for rows in (64, 48))
    inputs[:, 5] *= 100
    return inputs, weight


def test_the_scale_is_the_equation_with_a_mean_of_1():
    inputs, weights = torch.tensor([4.0, 1.0, 0.0, 9.0]), torch.tensor([1.0, 4.0, 2.0, 0.0])
    found = smoothing_scale(inputs, weights, 0.5, 0.5)
    assert found.tolist() == pytest.approx([2.0, 0.5, 1.0, 1.0])  # 2 and 1/2; zeros keep theirs
    mantissa, _ = torch.frexp(smoothing_scale(*uneven(1)[0][:2].abs(), 0.7, 0.2, exact=True))
    assert (mantissa == 0.5).all()


def test_what_is_searched_errs_less_than_a_fixed_share_and_than_nothing():
    inputs, weight = uneven()
    found, half, none = (
        search(inputs, weight, rounded_inputs, rounded, alpha=alpha, beta=alpha)
        for alpha in (None, 0.5, 0.0)
    )
    wanted = inputs.double() @ weight.double().T
    by_hand = rounded(inputs / found.scale).double() @ rounded(weight * found.scale).double().T
    error = (by_hand - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert found.loss == pytest.approx(float(error), rel=1e-3)
    assert found.loss <= half.loss < none.loss
    groups = torch.arange(32) // 4
    together = search(inputs, weight, rounded_inputs, rounded, groups).scale.view(8, 4)
    assert (together == together[:, :1]).all()
    assert not torch.equal(together.flatten(), found.scale)


def schemes_of(layers: Layers, num_parts: int, recipe: Recipe = FLEX) -> list[dict]:
    return [
        {
            name: scheme.fitting(linear.in_features)
            for name, linear in linears(layers.skeleton(number))
            if (scheme := recipe.scheme(layers.prefix(number) + name))
        }
        for number in range(num_parts)
    ]


@torch.inference_mode()
def test_folding_changes_no_output_of_any_family(with_mtp):
    """In float64; the control divides one producer by another scale."""
    target, words = Target.open(with_mtp), torch.tensor([1, 5, 6, 7, 8, 9, 2, 4, 3, 6, 1, 0])
    layers = Layers(target, Weights(with_mtp))
    schemes, rule = schemes_of(layers, layers.num_layers + 1), FLEX.smoothing
    assert rule is not None
    found = smoothings(layers, schemes, rule, [words, words.flip(0)])
    kinds = {name.rpartition("|")[2] for name in found}
    assert kinds == {"norm-linear", "ov", "up-down"}
    assert any(name.startswith(target.mtp_prefix) for name in found)
    scales = {name: one.scale for name, one in found.items()}
    assert max(float((scale - 1).abs().max()) for scale in scales.values()) > 0.1
    whole = folded(layers, schemes, rule, scales)
    wrong = folded(layers, schemes, rule, scales)
    name = next(name for name in wrong.rows if name.endswith("up_proj.weight"))
    wrong = type(wrong).of(wrong, {**wrong.rows, name: wrong.rows[name] * 1.01}, wrong.columns)

    def outputs(checkpoint) -> list[torch.Tensor]:
        """Of every layer on the same states, and of the MTP layer's block."""
        part, pack = Layers(target, Weights(checkpoint)), packed([words])[0]
        states, found = layers.embedding()[pack.tokens].double(), []
        torch.set_default_dtype(torch.float64)
        try:
            modules = [part.decoder(number) for number in range(part.num_layers)]
            for module in [*modules, part.mtp().block]:
                found.append(part.run(module.double(), states, pack))
        finally:
            torch.set_default_dtype(torch.float32)
        return found

    before, after, broken = (outputs(one) for one in (layers.weights.checkpoint, whole, wrong))
    for one, other in zip(before, after, strict=True):
        assert float((one - other).abs().max()) < 2e-5 * float(one.abs().max())
    changed = [
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(before, broken, strict=True)
    ]
    assert max(changed) > 5e-5


def test_static_inputs_are_searched_with_the_scale_of_what_smoothing_makes_of_them(tmp_path):
    """The error that was found is that of one scale and offset over all inputs, as they are served;
    the control rounds every token by its own."""
    recipe = parse_recipe(STATIC, "static")
    target = Target.open(write_target(tmp_path / "target", "LlamaForCausalLM"))
    export(target, new_layer(target, seed=0), tmp_path / "whole")
    layers = Layers(Target.open(tmp_path / "whole"), Weights(tmp_path / "whole"))
    words = [torch.arange(10).repeat(4), torch.arange(9, 0, -1).repeat(3)]
    schemes, reader = schemes_of(layers, layers.num_layers, recipe), "mlp.down_proj"
    found = smoothings(layers, schemes, recipe.smoothing, words)
    one = found[f"{layers.prefix(0)}mlp.up_proj|up-down"]
    _, layer, seen = next(walked(layers, words, {0: [reader]}))
    weight, inputs = layer.get_parameter(f"{reader}.weight").double(), seen.of(reader).double()

    def error(held: torch.Tensor) -> float:
        wanted = inputs @ weight.T
        difference = held @ rounded(weight * one.scale).T - wanted
        return float(difference.square().mean().sqrt() / wanted.square().mean().sqrt())

    smooth = inputs / one.scale
    scale = (smooth.max() - smooth.min()) / 255
    offset = (-128 - smooth.min() / scale).round()
    held = ((smooth / scale + offset).round().clamp(-128, 127) - offset) * scale
    assert one.loss == pytest.approx(error(held), rel=1e-2)
    assert one.loss != pytest.approx(error(rounded(smooth)), rel=0.1)


@pytest.fixture(scope="module")
def smoothed(nano, tmp_path_factory):
    out = tmp_path_factory.mktemp("smoothed") / "q"
    Quantization(nano, FLEX, out, num_texts=4).run()
    return out


def weights_of(folder) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.glob("quant_model_*")}


def test_saved_scales_give_the_same_bytes_without_calibration(nano, smoothed, tmp_path):
    task = Quantization(nano, FLEX, tmp_path / "again", smoothing=smoothed)
    assert task.mixture is None  # no text is read
    task.run()
    assert weights_of(tmp_path / "again") == weights_of(smoothed)
    plain = tmp_path / "plain"
    Quantization(nano, read_recipe("w8a8"), plain).run()
    assert weights_of(plain) != weights_of(smoothed)  # the control: no smoothing


def test_the_seam_of_the_mtp_layer_is_the_source_bit_by_bit(nano, smoothed):
    """What the head and the MTP layer read of the target, and the layer's own norms."""
    source, found = Checkpoint.open(nano), Checkpoint.open(smoothed)
    prefix = Target.open(nano).mtp_prefix
    seam = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    seam += [prefix + name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")]
    seam.append(prefix + "shared_head.norm.weight")
    for name in seam:
        assert torch.equal(source.tensor(name), found.tensor(name)), name
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(source.tensor(norm), found.tensor(norm))  # the control: one that is not
    for name in found.float_names():  # folding rounds no tensor that stays float
        assert found.tensor(name).dtype == source.tensor(name).dtype, name


def damaged(folder, change) -> None:
    path = folder / side_file.FOLDER / side_file.SCALES
    scales = load_file(path)
    change(scales)
    save_file(scales, path)
    described = folder / side_file.FOLDER / side_file.FOUND
    content = json.loads(described.read_text())
    content["scales_sha256"] = sha256(path)
    described.write_text(json.dumps(content))


def test_a_damaged_side_file_is_refused_in_a_sentence_and_nothing_is_written(
    nano, smoothed, tmp_path
):
    def refused(folder, match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as error:
            Quantization(nano, FLEX, tmp_path / "out", smoothing=folder).run()
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out.partial")

    def copied(name: str):
        return shutil.copytree(smoothed, tmp_path / name)

    def put(scales, make) -> None:
        scales[min(scales)] = make(scales[min(scales)])

    for number, (make, match) in enumerate(
        [
            (lambda scale: scale[1:].clone(), "has .* of .*, not"),
            (lambda scale: scale.fill_(torch.nan), "is not finite and above 0"),
            (lambda scale: -scale, "is not finite and above 0"),
            (lambda scale: scale.double(), "has .* of"),
        ]
    ):
        folder = copied(str(number))
        damaged(folder, lambda scales, make=make: put(scales, make))
        refused(folder, match)
    cut = copied("cut") / side_file.FOLDER / side_file.SCALES
    cut.write_bytes(cut.read_bytes()[:-1])
    refused(tmp_path / "cut", "is not the file that was written")
    other = copied("other") / side_file.FOLDER / side_file.FOUND
    content = json.loads(other.read_text())
    other.write_text(json.dumps({**content, "model": {}}))
    refused(tmp_path / "other", "is of another model")
    with pytest.raises(ValueError, match="smooths nothing; leave out --smoothing"):
        Quantization(nano, read_recipe("w8a8"), tmp_path / "out", smoothing=smoothed)


def leaving_float(glob: str) -> Recipe:
    text = (BUILT_IN / "w8a8-flex.yaml").read_text(encoding="utf-8")
    return parse_recipe(text.replace('"*kv_b_proj"', f'"*kv_b_proj", "{glob}"'), glob)


@pytest.mark.parametrize(
    "module",
    ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa"],
    ids=["what makes the inputs", "what reads them beside a quantized linear"],
)
def test_scales_that_would_round_a_matrix_which_stays_float_are_refused(
    nano, smoothed, tmp_path, module
):
    """Folded, bfloat16 no longer holds the matrix. Its own search finds scales that leave it exact,
    which the recipe that quantizes the matrix takes too."""
    recipe, out = leaving_float(module), tmp_path / "out"
    with pytest.raises(CheckpointError, match=f"round {module}, .* leave out --smoothing") as error:
        Quantization(nano, recipe, out, smoothing=smoothed).run()
    assert "\n" not in str(error.value)
    left = sorted(path.name for path in (tmp_path / "out.partial").iterdir())
    assert left == ["lock", "task.json"]  # nothing was solved
    layers = Layers(Target.open(nano), Weights(nano))
    schemes = schemes_of(layers, layers.num_layers + 1, recipe)
    scales = load_file(smoothed / side_file.FOLDER / side_file.SCALES)
    matrix = folded(layers, schemes, recipe.smoothing, scales).tensor(f"{module}.weight")
    assert not torch.equal(matrix.bfloat16().float(), matrix.float())

    shutil.rmtree(tmp_path / "out.partial")
    Quantization(nano, recipe, out, num_texts=2).run()
    assert Checkpoint.open(out).tensor(f"{module}.weight").dtype == torch.bfloat16
    for again in (recipe, FLEX):
        Quantization(nano, again, tmp_path / f"by {again.name}", smoothing=out).run()
    assert weights_of(tmp_path / f"by {recipe.name}") == weights_of(out)


def test_a_recipe_takes_modelslims_words_and_refuses_others():
    text = """
spec:
  process:
    - {type: flex_smooth_quant, alpha: 0.5, enable_subgraph_type: [ov], exclude: ["*.3.*"]}
    - {type: linear_quant, qconfig: {weight: {scope: per_channel, dtype: int8}}}
"""
    rule = parse_recipe(text, "any").smoothing
    assert rule is not None and (rule.alpha, rule.beta) == (0.5, None)
    assert rule.smooths("ov", "model.layers.2.self_attn.o_proj")
    assert not rule.smooths("ov", "model.layers.3.self_attn.o_proj")
    assert not rule.smooths("up-down", "model.layers.2.mlp.down_proj")
    with pytest.raises(RecipeError, match="enable_subgraph_type"):
        parse_recipe(text.replace("[ov]", "[linear-linear]"), "any")
