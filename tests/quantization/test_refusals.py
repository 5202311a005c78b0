"""Invariant: a quantized checkpoint with one defect is refused in one sentence that names the
tensor or the setting and the remedy. Every row changes one thing of a checkpoint that is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import packers
import pytest
from packers import Packed
from test_layouts import INT, PLAIN, TENSOR

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.layouts.ours import SIDE_FILE, write_side_file
from sglang_ascend.quantization.verification import verify

DESCRIPTION = "quant_model_description.json"
Change = Callable[[Packed], object]
PACKERS: dict[str, Callable[[], Packed]] = {
    "gptq": packers.gptq,
    "awq": packers.awq,
    "fp8": packers.block_fp8,
    "packed": lambda: packers.compressed(INT),
    "plain": lambda: packers.compressed(PLAIN, (6, 88), "int-quantized", TENSOR),
    "modelslim": packers.modelslim,
    "modelslim groups": lambda: packers.modelslim(32, 88),
}


def without(name: str) -> Change:
    return lambda packed: packed.tensors.pop(name)


def first_value(name: str, value: float) -> Change:
    def change(packed: Packed) -> None:
        packed.tensors[name][1].flat[0] = value

    return change


def as_dtype(name: str, dtype: str, numpy_dtype: str) -> Change:
    def change(packed: Packed) -> None:
        packed.tensors[name] = dtype, packed.tensors[name][1].astype(numpy_dtype)

    return change


def setting(name: str, value: object) -> Change:
    return lambda packed: packed.config["quantization_config"].update({name: value})


def weights(name: str, value: object) -> Change:
    def change(packed: Packed) -> None:
        packed.config["quantization_config"]["config_groups"]["group_0"]["weights"][name] = value

    return change


def described(name: str, value: object) -> Change:
    return lambda packed: packed.files[DESCRIPTION].update({name: value})


def extra(name: str, raw: packers.Raw) -> Change:
    return lambda packed: packed.tensors.update({name: raw})


def beside_weights(name: str) -> Change:
    """A float tensor of ModelSlim's that is no weight."""

    def change(packed: Packed) -> None:
        extra(name, packers.f32(np.ones(3)))(packed)
        described(name, "FLOAT")(packed)

    return change


def cut_rows(name: str) -> Change:
    def change(packed: Packed) -> None:
        packed.tensors[name] = packed.tensors[name][0], packed.tensors[name][1][:-1]

    return change


# name: (checkpoint, change, words of the sentence)
CASES: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    # unknown schemes
    "type": ("modelslim", described("a.fp8.weight", "W8A8_NEW"), ("a.fp8.weight", "W8A8_NEW")),
    "no type": (
        "modelslim",
        lambda packed: packed.files[DESCRIPTION].pop("a.fp8.weight"),
        ("no type for a.fp8.weight", "copy both files"),
    ),
    "type is a number": ("modelslim", described("a.fp8.weight", 8), ("no type for a.fp8.weight",)),
    "method": ("gptq", setting("quant_method", "marlin24"), ("config.json", "marlin24", "convert")),
    "method is a list": ("gptq", setting("quant_method", ["gptq"]), ("quantized by", "convert")),
    "settings are a list": (
        "gptq",
        lambda packed: packed.config.update(quantization_config=[1]),
        ("quantization_config that is no object", "restore"),
    ),
    "gptq bits": ("gptq", setting("bits", 3), ("bits = 3", "2 or 4 or 8")),
    "gptq version": ("gptq", setting("checkpoint_format", "marlin"), ("marlin", "gptq_v2")),
    "gptq modules of their own": ("gptq", setting("dynamic", {"+:a": {"bits": 8}}), ("dynamic",)),
    "gptq version is a list": ("gptq", setting("checkpoint_format", []), ("checkpoint_format",)),
    "gptq dynamic is a flag": ("gptq", setting("dynamic", True), ("dynamic = True",)),
    "awq version": ("awq", setting("version", "gemv"), ("version = gemv", "gemm")),
    "awq without zeros": ("awq", setting("zero_point", False), ("zero_point = False",)),
    "compressed format": ("packed", setting("format", "nvfp4-pack-quantized"), ("format", "nvfp4")),
    "compressed bits": ("packed", weights("num_bits", 3), ("num_bits = int 3",)),
    "compressed strategy": ("packed", weights("strategy", "attn_head"), ("strategy", "channel")),
    "no target": (
        "packed",
        lambda packed: packed.config["quantization_config"]["config_groups"]["group_0"].update(
            targets=["b.q_proj"]
        ),
        ("a.q_proj", "no target", "restore"),
    ),
    "targets that are no expression": (
        "packed",
        lambda packed: packed.config["quantization_config"]["config_groups"]["group_0"].update(
            targets=["re:("]
        ),
        ("re:(", "regular expression"),
    ),
    "ignored": ("packed", setting("ignore", ["re:.*q_proj"]), ("a.q_proj", "ignores it")),
    "static fp8": ("fp8", setting("activation_scheme", "static"), ("activation_scheme", "dynamic")),
    "no block": ("fp8", setting("weight_block_size", [0, 128]), ("weight_block_size = [0, 128]",)),
    "smoothed at run time": (
        "modelslim",
        beside_weights("a.div.mul_scale"),
        ("a.div.mul_scale", "not served", "fused"),
    ),
    "shifted at run time": (
        "modelslim",
        beside_weights("a_layernorm.bias"),
        ("a_layernorm.bias", "not served", "another anti-outlier method"),
    ),
    "transformed at run time": (
        "packed",
        setting(
            "transform_config",
            {
                "config_groups": {
                    "R4": {"apply": [{"location": "input"}, {"location": "weight_output"}]}
                }
            },
        ),
        ("transform_config", "transforms of weights alone"),
    ),
    # missing tensors
    "no scales": ("gptq", without("a.q_proj.scales"), ("a.q_proj.scales is missing",)),
    "no qweight": ("gptq", without("a.q_proj.qweight"), ("a.q_proj.qweight is missing",)),
    "no zeros": ("awq", without("a.q_proj.qzeros"), ("a.q_proj.qzeros is missing",)),
    "no scale_inv": (
        "fp8",
        without("a.q_proj.weight_scale_inv"),
        ("a.q_proj.weight_scale_inv is missing",),
    ),
    "no weight_scale": (
        "plain",
        without("a.q_proj.weight_scale"),
        ("a.q_proj.weight_scale is missing",),
    ),
    "no zero point": (
        "packed",
        without("a.q_proj.weight_zero_point"),
        ("a.q_proj.weight_zero_point is missing",),
    ),
    "no input_scale": (
        "plain",
        without("a.q_proj.input_scale"),
        ("a.q_proj.input_scale is missing",),
    ),
    "no deq_scale": (
        "modelslim",
        without("a.static.deq_scale"),
        ("a.static.deq_scale is missing",),
    ),
    "no weight": ("modelslim", without("a.W8A16.weight"), ("a.W8A16.weight is missing",)),
    "no scale_bias": (
        "modelslim",
        without("a.down_proj.scale_bias"),
        ("a.down_proj.scale_bias is missing",),
    ),
    # codes that nothing explains
    "codes as FLOAT": (
        "modelslim",
        described("a.W8A16.weight", "FLOAT"),
        ("a.W8A16.weight as I8", "float"),
    ),
    "codes in a float module": (
        "gptq",
        extra("b.weight", packers.i8(np.ones((2, 2)))),
        ("b.weight as I8", "export it as BF16"),
    ),
    "codes without settings": (
        "gptq",
        lambda packed: packed.config.pop("quantization_config"),
        ("a.q_proj.qweight as I32", "(float)"),
    ),
    "floats as codes": (
        "gptq",
        as_dtype("a.q_proj.qweight", "F32", "<f4"),
        ("a.q_proj.qweight is float32", "int32"),
    ),
    "wide codes": (
        "modelslim",
        as_dtype("a.W8A16.weight", "I32", "<i4"),
        ("a.W8A16.weight is int32", "int8"),
    ),
    "codes beyond int4": (
        "modelslim",
        first_value("a.W4A4_DYNAMIC.weight", 8),
        ("a.W4A4_DYNAMIC.weight", "no int4"),
    ),
    "fp8 NaN": ("fp8", first_value("a.q_proj.weight", 0x7F), ("a.q_proj.weight", "no fp8_e4m3")),
    # scales
    **{
        f"{value} in {name}": (checkpoint, first_value(name, value), (name, "above 0"))
        for checkpoint, name in (
            ("gptq", "a.q_proj.scales"),
            ("awq", "a.q_proj.scales"),
            ("fp8", "a.q_proj.weight_scale_inv"),
            ("plain", "a.q_proj.input_scale"),
            ("modelslim", "a.W8A16.weight_scale"),
            ("modelslim", "a.static_bf16.deq_scale"),
            ("modelslim", "a.static.input_scale"),
            ("modelslim groups", "a.down_proj.weight_scale_second"),
        )
        for value in (0, -0.5, np.nan, np.inf)
    },
    "bits of a negative scale": (
        "modelslim",
        first_value("a.static.deq_scale", -(2**31)),
        ("a.static.deq_scale", "bits of a float32"),
    ),
    "offset is NaN": (
        "modelslim",
        first_value("a.W8A16.weight_offset", np.nan),
        ("a.W8A16.weight_offset", "NaN"),
    ),
    # sizes
    "gptq group size": ("gptq", setting("group_size", 16), ("a.q_proj.scales", "[4, 16]")),
    "awq group size": ("awq", setting("group_size", -1), ("a.q_proj.qzeros", "[1, 2]")),
    "compressed group size": (
        "packed",
        weights("group_size", 8),
        ("a.q_proj.weight_scale", "[16, 8]"),
    ),
    "group size is 0": ("gptq", setting("group_size", 0), ("group_size = 0",)),
    "group size is a word": ("awq", setting("group_size", "all"), ("group_size = all",)),
    "modelslim group size": (
        "modelslim groups",
        described("group_size", 64),
        ("weight_scale", "3 groups for 88 columns", "64"),
    ),
    "modelslim group size is a word": ("modelslim", described("group_size", "32"), ("group_size",)),
    "a row too few": ("modelslim", cut_rows("a.W8A16.weight_scale"), ("a.W8A16.weight_scale",)),
    "a block too few": (
        "fp8",
        cut_rows("a.q_proj.weight_scale_inv"),
        ("weight_scale_inv", "[2, 2]"),
    ),
    "shape of more than there is": (
        "packed",
        first_value("a.q_proj.weight_shape", 2**40),
        ("a.q_proj.weight_packed", "[1099511627776, 8]"),
    ),
    "shape below 0": ("packed", first_value("a.q_proj.weight_shape", -1), ("weight_shape",)),
    "group out of range": ("gptq", first_value("a.q_proj.g_idx", 2), ("a.q_proj.g_idx", "outside")),
    "group below 0": ("gptq", first_value("a.q_proj.g_idx", -1), ("a.q_proj.g_idx", "outside")),
    # tensors that the settings do not explain
    "an order of groups that no setting says": (
        "packed",
        extra("a.q_proj.weight_g_idx", packers.i32(np.arange(64)[::-1] // 32)),
        ("a.q_proj.weight_g_idx", "no actorder"),
    ),
    "zeros of a symmetric weight": (
        "plain",
        extra("a.q_proj.weight_zero_point", packers.i8(np.ones((6, 1)))),
        ("a.q_proj.weight_zero_point", "calls the weight symmetric"),
    ),
    "a scale of inputs that are float": (
        "packed",
        extra("a.q_proj.input_scale", packers.f32(np.ones(1))),
        ("a.q_proj.input_scale", "no static inputs"),
    ),
    "empty": (
        "gptq",
        extra("a.q_proj.qweight", packers.i32(np.ones((0, 16)))),
        ("a.q_proj.qweight", "holds nothing"),
    ),
}


def assert_refused(folder: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        verify(Checkpoint.open(folder))
    sentence = str(caught.value)
    assert "\n" not in sentence and ";" in sentence, sentence
    for word in words:
        assert word in sentence, sentence


@pytest.mark.parametrize("checkpoint", PACKERS)
def test_the_controls_are_accepted(checkpoint, tmp_path):
    verified = verify(Checkpoint.open(PACKERS[checkpoint]().write(tmp_path)))
    assert verified.num_modules >= 1 and verified.num_float_tensors >= 1


@pytest.mark.parametrize("case", CASES)
def test_one_defect_is_refused_in_one_sentence(case, tmp_path):
    checkpoint, change, words = CASES[case]
    packed = PACKERS[checkpoint]()
    change(packed)
    assert_refused(packed.write(tmp_path), words)


@pytest.mark.parametrize("checkpoint", PACKERS)
def test_a_truncated_shard_is_refused(checkpoint, tmp_path):
    path = PACKERS[checkpoint]().write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(tmp_path, ("model.safetensors is truncated", "copy or download it again"))


@pytest.mark.parametrize("index", ["model", "quant_model_weights"])
@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/x.safetensors", "a\\b.safetensors"]
)
def test_a_path_in_an_index_is_refused(index, shard, tmp_path):
    packers.modelslim().write(tmp_path)
    name = f"{index}.safetensors.index.json"
    (tmp_path / name).write_text(json.dumps({"weight_map": {"a.fp8.weight": shard}}))
    assert_refused(tmp_path, (name, "a.fp8.weight", "no plain .safetensors file name"))


def test_an_index_of_modelslim_promises_what_its_shards_hold(tmp_path):
    packers.modelslim().write(tmp_path)
    index = tmp_path / "quant_model_weights.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.fp8.weight": "model.safetensors"}}))
    assert verify(Checkpoint.open(tmp_path)).num_modules
    index.write_text(json.dumps({"weight_map": {"a.fp9.weight": "model.safetensors"}}))
    assert_refused(tmp_path, ("promises a.fp9.weight", "copy or download both files"))


def test_sums_of_nibbles_in_another_order_are_refused(tmp_path):
    """Codes and scales alone cannot tell; ModelSlim's scale_bias does."""
    packed = packers.modelslim()
    dtype, codes = packed.tensors["a.down_proj.weight"]
    swapped = ((codes.view("u1") >> 4) | (codes.view("u1") << 4)).view("i1")
    packed.tensors["a.down_proj.weight"] = dtype, swapped
    assert_refused(packed.write(tmp_path), ("a.down_proj.scale_bias", "8 times"))


class TestOurSideFile:
    def folder(self, tmp_path: Path) -> Path:
        packers.modelslim().write(tmp_path)
        write_side_file(tmp_path, {"weights": "int8"})
        return tmp_path

    def edit(self, folder: Path, **fields: object) -> None:
        path = folder / SIDE_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def test_recipe_and_hashes_are_read(self, tmp_path):
        checkpoint = Checkpoint.open(self.folder(tmp_path))
        assert checkpoint.layout.name == "sglang-ascend"
        assert checkpoint.layout.recipe == {"weights": "int8"}
        assert verify(checkpoint).num_hashes == 3

    def test_a_changed_file_is_refused(self, tmp_path):
        path = self.folder(tmp_path) / "config.json"
        path.write_text(path.read_text() + " ")
        assert_refused(tmp_path, ("config.json", "SHA-256", "copy the checkpoint again"))

    def test_a_missing_file_is_refused(self, tmp_path):
        self.edit(self.folder(tmp_path), sha256={"gone.json": "0"})
        assert_refused(tmp_path, ("gone.json", "cannot be read"))

    def test_a_shard_without_a_hash_is_refused(self, tmp_path):
        self.edit(self.folder(tmp_path), sha256={})
        assert_refused(tmp_path, ("model.safetensors", "has no SHA-256"))

    @pytest.mark.parametrize(
        "name", ["../config.json", "/etc/passwd", "a/b", "..", ".", "", "a\\b"]
    )
    def test_a_path_is_refused(self, name, tmp_path):
        self.edit(self.folder(tmp_path), sha256={name: "0"})
        assert_refused(tmp_path, (SIDE_FILE, "no plain file name"))

    @pytest.mark.parametrize(
        ("fields", "word"),
        [({"version": 2}, "version 2"), ({"recipe": []}, "recipe"), ({"sha256": [1]}, "SHA-256")],
    )
    def test_another_form_is_refused(self, fields, word, tmp_path):
        self.edit(self.folder(tmp_path), **fields)
        assert_refused(tmp_path, (SIDE_FILE, word))
