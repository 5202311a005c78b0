"""What `plan-memory` counts of a quantized model is what the files of `quantize` give back."""

from dataclasses import replace
from pathlib import Path

import pytest
from memory.planned import planned

from sglang_ascend.checkpoint.config import read_config
from sglang_ascend.models import catalog
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.qconfig import layout_of
from sglang_ascend.quantization.recipe import BUILT_IN, read_recipe
from sglang_ascend.quantization.weight import HEAD, InputKind, QuantizedWeight

UNLIKE = ("w8a8", "w4a8", "w4a16", "fp8", "w8a8-head")
# By name, a recipe of the package, or the words of a linear_quant.
RECIPES = {
    **dict.fromkeys((*UNLIKE, "w4a4"), ""),
    "int2": "qconfig: {weight: {scope: per_group, dtype: int2, ext: {group_size: 8}}}",
    "int3": "qconfig: {weight: {scope: per_channel, dtype: int3}}",
    "int4 with zeros": "qconfig: {weight: {scope: per_group, dtype: int4, symmetric: false}}",
    "hqq": "qconfig: {weight: {scope: per_channel, dtype: int4, symmetric: false, method: hqq}}",
    "qoq": (
        "qconfig: {act: {scope: per_token, dtype: int8}, weight: {scope: per_group, dtype: int4,"
        " symmetric: false, method: qoq, ext: {group_size: 8}}}"
    ),
    "hif4": "qconfig: {weight: {scope: per_block, dtype: hif4}}",
    "mxfp4": (
        "qconfig: {act: {scope: per_block, dtype: mxfp8}, weight: {scope: per_block, dtype: mxfp4}}"
    ),
    "nf4": "qconfig: {weight: {scope: per_group, dtype: nf4, ext: {group_size: 8}}}",
    "static": (
        "qconfig: {act: {scope: per_tensor, dtype: int8, symmetric: false},"
        " weight: {scope: per_channel, dtype: int8}}, include: ['*self_attn*']"
    ),
}


def held_bytes(folder: Path) -> int:
    """Of every tensor that the files of a quantized checkpoint hold, read one by one."""
    checkpoint = Checkpoint.open(folder)
    quantized = sum(checkpoint.weight(module).num_bytes for module in checkpoint.schemes)
    return quantized + sum(checkpoint.entries[n].num_bytes for n in checkpoint.float_names())


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request, tmp_path_factory) -> str:
    """As `plan-memory` and `quantize` take it."""
    words = RECIPES[request.param]
    if not words:
        return request.param
    path = tmp_path_factory.mktemp("recipe") / f"{request.param}.yaml"
    path.write_text(f"spec: {{process: [{{type: linear_quant, {words}}}]}}")
    return str(path)


@pytest.fixture(scope="module")
def quantized(recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    folder = catalog.model_path("nano-deepseek")
    Quantization(folder, read_recipe(recipe), out, num_texts=2).run()
    return out


def test_quantized_weights_are_the_bytes_of_the_files(recipe, quantized):
    config = read_config(catalog.model_path("nano-deepseek"))
    assert planned(config, recipe).total_bytes == held_bytes(quantized)


def test_inputs_that_stay_float_take_no_bytes_of_files(tmp_path):
    folder, recipe = catalog.model_path("nano-deepseek"), tmp_path / "mixed.yaml"
    mixed = (BUILT_IN / "w8a8-mixed.yaml").read_text(encoding="utf-8")
    recipe.write_text(mixed.replace("0.0014", "0.0001"))  # the recipe's leaves none of nano's
    Quantization(folder, read_recipe(str(recipe)), tmp_path / "out", num_texts=2).run()
    checkpoint = Checkpoint.open(tmp_path / "out")
    kinds = {checkpoint.weight(module).input_rule.kind for module in checkpoint.schemes}
    assert kinds == {InputKind.NONE, InputKind.PER_TOKEN}
    assert planned(read_config(folder), str(recipe)).total_bytes == held_bytes(tmp_path / "out")


def test_recipes_are_told_apart_by_their_bytes():
    """The control of the test above."""
    config = read_config(catalog.model_path("nano-deepseek"))
    totals = [planned(config, name).total_bytes for name in UNLIKE]
    assert len(set(totals)) == len(UNLIKE)


def form(weight: QuantizedWeight) -> tuple:
    """All that decides how a weight is held, but the values of a static input."""
    weight, rule = weight.refined((1, weight.block[1])), weight.input_rule
    if rule.kind == InputKind.STATIC:
        rule = replace(rule, scale=1.0, offset=0.0)
    width = min(weight.block[1], weight.shape[1])
    parts = weight.shape, weight.scale.shape, weight.zero is None, weight.group_index is None
    return *parts, width, weight.number_format, rule


def test_a_scheme_s_form_is_what_its_files_give_back(recipe, quantized):
    """The control: ModelSlim's files give weight-only integers back in 8 bits, others do not."""
    checkpoint, spec = Checkpoint.open(quantized), read_recipe(recipe)
    schemes, read = {}, {}
    for module in checkpoint.schemes:
        weight = checkpoint.weight(module)
        asked = spec.head_scheme if module == HEAD else spec.scheme(module)
        schemes[module], read[module] = asked.fitting(weight.shape[1]), form(weight)

    def counted(layout: str) -> dict[str, tuple]:
        shapes = {module: of[0] for module, of in read.items()}
        return {m: form(schemes[m].without_values(*shapes[m], layout)) for m in read}

    layout = layout_of(list(schemes.values()))
    assert counted(layout) == read
    if layout == "compressed-tensors":
        assert counted("modelslim") != read


def test_a_head_that_was_tied_is_counted_where_it_is_quantized():
    config = read_config(catalog.model_path("smollm2-mtp"))
    rows, columns = config.size("vocab_size"), config.size("hidden_size")
    head = planned(config, "w8a8-head").total_bytes - planned(config, "w8a8").total_bytes
    assert config.flag("tie_word_embeddings") and head == rows * (columns + 4)
