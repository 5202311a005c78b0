"""A recipe gives every linear the scheme that ModelSlim's rules give it, or one sentence."""

import json
from typing import Any

import pytest

from sglang_ascend.quantization.recipe import (
    Recipe,
    RecipeError,
    built_in_names,
    parse_recipe,
    read_recipe,
)

ATTENTION = "model.layers.3.self_attn.o_proj"
ABSORBED = "model.layers.3.self_attn.kv_b_proj"
EXPERT = "model.layers.3.mlp.experts.7.down_proj"
SHARED = "model.layers.3.mlp.shared_experts.down_proj"

# As a published recipe of msmodelslim: anchors beside the spec, a group, and settings of its own.
ANCHORED = """
apiversion: modelslim_v1
metadata: {config_id: any, score: 90}
default_w8a8_dynamic: &w8a8
  act: {scope: "per_token", dtype: "int8", symmetric: True, method: "minmax"}
  weight: {scope: "per_channel", dtype: "int8", symmetric: True, method: "minmax"}
spec:
  runner: layer_wise
  process:
    - type: "group"
      configs:
        - {type: "linear_quant", qconfig: *w8a8, include: ["*"]}
        - type: "linear_quant"
          qconfig:
            weight:
              {scope: per_group, dtype: int4, symmetric: false, method: gptq, ext: {group_size: 32}}
          include: ["*self_attn*"]
          exclude: ["*kv_b_proj"]
    - type: "linear_quant"
      qconfig:
        weight: {scope: per_channel, dtype: int8}
  dataset: mix_calib.jsonl
  save: [{type: "ascendv1_saver", part_file_size: 4}]
"""


@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("w8a8", ["W8A8", None, "W8A8", "W8A8"]),
        ("w8a8-flex", ["W8A8", None, "W8A8", "W8A8"]),
        ("w8a8-mixed", ["W8A8", None, "W8A8", "W8A8"]),
        ("w8a8-head", ["W8A8", None, "W8A8", "W8A8"]),
        ("w8a8-rotated", ["W8A8 rotated", None, "W8A8 rotated", "W8A8 rotated"]),
        ("w8a8-rotated-gptq", ["W8A8 rotated", None, "W8A8 rotated", "W8A8 rotated"]),
        ("w8a16", ["W8A16", None, "W8A16", "W8A16"]),
        ("w4a16", ["W4A16", None, "W4A16", "W4A16"]),
        ("w4a8", ["W8A8", None, "W4A8", "W8A8"]),
        ("w4a4", ["W8A8 rotated", None, "W4A4 rotated", "W8A8 rotated"]),
        ("fp8", ["FP8 W8A8"] * 4),
    ],
)
def test_the_built_in_recipes_say_what_their_names_say(name, schemes):
    found = [read_recipe(name).scheme(module) for module in (ATTENTION, ABSORBED, EXPERT, SHARED)]
    assert [scheme and scheme.name for scheme in found] == schemes
    assert name in built_in_names() and len(built_in_names()) == 11


def recipe_of(*process: dict[str, Any]) -> Recipe:
    return parse_recipe(json.dumps({"spec": {"process": process}}), "recipe")


def rule(dtype: str, *include: str, **fields: Any) -> dict[str, Any]:
    qconfig = {"weight": {"scope": "per_channel", "dtype": dtype}}
    return {"type": "linear_quant", "qconfig": qconfig, "include": include, **fields}


def test_the_head_has_the_last_rule_of_a_group_that_names_it():
    rules = [rule("int8", "*", "lm_head"), rule("int4", "lm_head"), rule("int8", "*")]
    scheme = recipe_of({"type": "group", "configs": rules}).head_scheme
    assert scheme is not None and scheme.name == "W4A16"
    rules[1]["exclude"] = ["lm_*"]
    assert recipe_of({"type": "group", "configs": rules}).head_scheme is None


@pytest.mark.parametrize(
    ("side", "ext", "sentence"),
    [
        ("weight", {"max_error": 0.1}, "max_error is an ext of act"),
        ("act", {"act_order": True}, "act_order is an ext of weight"),
    ],
)
def test_what_a_side_does_not_have_is_refused_there(side, ext, sentence):
    asked = rule("int8", "*")
    asked["qconfig"]["act"] = {"scope": "per_token", "dtype": "int8"}
    asked["qconfig"][side]["ext"] = ext
    with pytest.raises(RecipeError, match=sentence):
        recipe_of(asked)


def test_a_second_smoothing_is_refused():
    smoothing = {"type": "flex_smooth_quant"}
    with pytest.raises(RecipeError, match="one flex_smooth_quant"):
        recipe_of(smoothing, rule("int8", "*"), smoothing)


def test_a_head_is_quantized_only_by_name():
    heads = {name: read_recipe(name).head_scheme for name in built_in_names()}
    assert {name: scheme.name for name, scheme in heads.items() if scheme} == {"w8a8-head": "W8A8"}


def test_the_last_of_a_group_wins_and_the_first_process_wins():
    recipe = parse_recipe(ANCHORED, "any")
    found = [recipe.scheme(module) for module in (ATTENTION, ABSORBED, EXPERT)]
    assert [scheme and scheme.name for scheme in found] == ["W4A16", "W8A8", "W8A8"]


@pytest.mark.parametrize(("width", "name"), [(96, "W4A16"), (88, "W8A16"), (240, "W8A16")])
def test_groups_that_do_not_divide_a_width_become_int8_per_channel(width, name):
    scheme = parse_recipe(ANCHORED, "any").scheme(ATTENTION)
    assert scheme is not None
    fitted = scheme.fitting(width)
    assert fitted.name == name
    assert fitted.weight.scope == ("per_group" if width == 96 else "per_channel")


QOQ = """
spec:
  process:
    - type: linear_quant
      qconfig:
        weight: {scope: per_channel, dtype: int4, symmetric: false, method: qoq}
"""


def changed(old: str, new: str) -> str:
    assert old in ANCHORED
    return ANCHORED.replace(old, new)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("spec: [", "is no YAML mapping"),
        ("- 1", "is no YAML mapping"),
        ("spec: {process: []}", "has a wrong spec.process"),
        (changed("modelslim_v1", "modelslim_v0"), "has a wrong apiversion"),
        (
            changed("method: gptq", "method: ssz"),
            "weight.method: Input should be",
        ),
        (changed("dtype: int4", "dtype: mxfp6"), "weight.dtype"),
        (changed("dtype: int4", "dtype: mxfp4"), "mxfp4 has blocks of its own"),
        (changed("dtype: int4", "dtype: nf4"), "nf4 has no zero point"),
        (
            QOQ + "      include: [a]\n      include: [b]\n",
            "has include twice in the mapping at line 4;",
        ),
        (QOQ, "qoq is of int4 per_group"),
        (QOQ.replace("qoq", "hqq").replace("false", "true"), "hqq has zero points"),
        (QOQ.replace("int4", "mxfp4").replace("per_channel", "per_block"), "has no zero point"),
        (changed("scope: per_group", "scope: per_block"), "gptq corrects row by row"),
        (changed('type: "group"', 'type: "flex_smooth_quant"'), "flex_smooth_quant"),
        (changed("group_size: 32", "group_size: 0"), "group_size"),
        (changed("group_size: 32", "groups: 32"), "groups"),
        (
            changed(
                "            weight:",
                "            act: {scope: per_token, dtype: int8}\n            weight:",
            ),
            "a weight with zero points goes without act",
        ),
        (
            changed(
                "            weight:",
                "            act: {scope: per_token, dtype: int8, ext: {max_error: 0.1}}\n"
                "            weight:",
            ),
            "which only an int8 weight goes with",
        ),
        (
            changed(
                '{scope: "per_token", dtype: "int8", ',
                '{scope: "per_tensor", dtype: "int8", ext: {max_error: 0.1}, ',
            ),
            "max_error is of inputs that are scaled per_token",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(text, reason):
    with pytest.raises(RecipeError) as refusal:
        parse_recipe(text, "mine.yaml")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "mine.yaml" in str(refusal.value)


PARTS = """
spec:
  process:
    - {type: flex_smooth_quant, exclude: ["*o_prj"]}
    - type: linear_quant
      qconfig: &int8 {weight: {scope: per_channel, dtype: int8}}
      include: ["*q_proj", "*k_prj"]
      exclude: ["lm_head", "*kv_b_prj", "*0.q_proj"]
    - type: linear_quant
      qconfig: *int8
      include: ["layers.1.q_proj"]
    - type: linear_quant
      qconfig: *int8
      include: ["*experts*", "*router*"]
    - type: linear_quant
      qconfig: *int8
      include: ["lm_head"]
"""
LINEARS = ["layers.0.q_proj", "layers.1.q_proj", "layers.0.o_proj"]


def test_what_of_a_recipe_did_nothing_is_said_glob_by_glob():
    """Each of these is a typing mistake that gives a checkpoint all the same."""
    assert parse_recipe(PARTS, "mine.yaml").idle(LINEARS) == (
        "no linear matches *k_prj of include",
        "no linear matches *kv_b_prj of exclude",
        "another part decides every linear that matches layers.1.q_proj",
        "no linear matches *experts*, *router*",
        "no linear matches *o_prj of exclude",
    )
    right = PARTS.replace(', "*k_prj"', "").replace('"*kv_b_prj", ', "").replace("o_prj", "o_proj")
    said = parse_recipe(right.replace("0.q_proj", "1.q_proj"), "mine.yaml").idle(LINEARS)
    assert said == ("no linear matches *experts*, *router*",)  # the control


@pytest.mark.parametrize("name", built_in_names())
def test_of_a_built_in_recipe_only_a_part_that_matches_nothing_is_said(name):
    parts = ("*.mlp.experts.*",) if name in ("w4a8", "w4a4") else ()
    assert read_recipe(name).idle(LINEARS) == tuple(f"no linear matches {part}" for part in parts)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        RecipeError,
        match=r"neither one of fp8, w4a16, w4a4, w4a8, .*, w8a8-rotated, w8a8-rotated-gptq nor a",
    ):
        read_recipe("w2a2")
