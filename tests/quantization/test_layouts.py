"""Invariant: every layout is read to the numbers that an independent packer wrote, bit by bit, and
a checkpoint whose nibbles, scales or zero points are displaced is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import packers
import pytest
import torch

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.formats import FP8_E4M3, INT4, INT8
from sglang_ascend.quantization.weight import PER_TOKEN, WEIGHT_ONLY, InputKind

INT = {"type": "int", "num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
SYMMETRIC = {**INT, "symmetric": True}
PLAIN = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
FP8 = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"}
BLOCKS = {**FP8, "strategy": "block", "block_structure": [128, 128]}
TOKEN = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
TENSOR = {"type": "int", "num_bits": 8, "symmetric": False, "strategy": "tensor", "dynamic": False}

CASES: dict[str, Callable[[], packers.Packed]] = {
    "gptq": packers.gptq,
    "gptq v2": lambda: packers.gptq(version="gptq_v2"),
    "gptq act-order": lambda: packers.gptq(shuffled=True),
    "gptq act-order 240": lambda: packers.gptq((24, 240), group_size=64, shuffled=True),
    "gptq 2 bits 240": lambda: packers.gptq((16, 240), 2, 128),
    "gptq 8 bits 88": lambda: packers.gptq((12, 88), 8, 32),
    "gptq 240": lambda: packers.gptq((24, 240), group_size=128),
    "gptq 90, words not full": lambda: packers.gptq((11, 90), group_size=32),
    "gptq per channel": lambda: packers.gptq((16, 88), group_size=-1),
    "awq": packers.awq,
    "awq 88": lambda: packers.awq((24, 88), 32),
    "awq 240": lambda: packers.awq((8, 240), 128),
    "awq per channel": lambda: packers.awq((16, 88), -1),
    "fp8": packers.block_fp8,
    "fp8 narrower than a block": lambda: packers.block_fp8((88, 40)),
    "fp8 of other blocks": lambda: packers.block_fp8((88, 240), (64, 32)),
    "fp8 whole blocks": lambda: packers.block_fp8((64, 96), (32, 32)),
    "packed": lambda: packers.compressed(INT),
    "packed symmetric 240": lambda: packers.compressed({**SYMMETRIC, "group_size": 64}, (10, 240)),
    "packed 90, words not full": lambda: packers.compressed(INT, (11, 90)),
    "packed act-order": lambda: packers.compressed(INT, (16, 88), shuffled=True),
    "packed 2 bits": lambda: packers.compressed({**INT, "num_bits": 2}, (12, 88)),
    "packed 8 bits": lambda: packers.compressed({**INT, "num_bits": 8}, (12, 88)),
    "packed W4A8": lambda: packers.compressed(SYMMETRIC, inputs=TOKEN),
    "plain int8": lambda: packers.compressed(PLAIN, (6, 88), "int-quantized", TOKEN),
    "plain int8 with zeros": lambda: packers.compressed(
        {**PLAIN, "symmetric": False}, (6, 88), "int-quantized", TOKEN
    ),
    "plain int8 static": lambda: packers.compressed(PLAIN, (6, 88), "int-quantized", TENSOR),
    "plain int8 per tensor": lambda: packers.compressed(
        {**PLAIN, "strategy": "tensor"}, (6, 88), "int-quantized", TOKEN
    ),
    "fp8 channel": lambda: packers.compressed(FP8, (6, 88), "float-quantized"),
    "fp8 blocks": lambda: packers.compressed(BLOCKS, (200, 240), "float-quantized"),
    "modelslim": packers.modelslim,
    "modelslim 240": lambda: packers.modelslim(in_features=240),
    "modelslim groups": lambda: packers.modelslim(32, 88),
    "modelslim groups 240": lambda: packers.modelslim(64, 240),
}


def read(packed: packers.Packed, folder) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(packed.write(folder))
    assert list(checkpoint.schemes) == [
        name for name in checkpoint.schemes if name in packed.values
    ]
    return {name: checkpoint.weight(name).dequantize().numpy() for name in checkpoint.schemes}


def assert_read(packed: packers.Packed, folder) -> None:
    values = read(packed, folder)
    assert values.keys() == {name for name in packed.values if not name.endswith(".bias")}
    for module, weight in values.items():
        # Several weight scales have the same product with the input's, and only that is stored.
        tolerance = 2.5e-7 if module.startswith("a.static") else 0
        np.testing.assert_allclose(weight, packed.values[module], rtol=tolerance, err_msg=module)


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_read_to_the_numbers_that_were_packed(case, tmp_path):
    assert_read(CASES[case](), tmp_path)


@pytest.mark.parametrize("control", packers.MISTAKES)
@pytest.mark.parametrize("case", CASES)
def test_a_displaced_tensor_is_read_to_other_numbers_or_refused(case, control, tmp_path):
    suffixes, change = packers.MISTAKES[control]
    packed = CASES[case]()
    changed = {}
    for name, raw in packed.tensors.items():
        module, _, suffix = name.rpartition(".")
        is_one_number = raw[1].size == 1
        if suffix in suffixes and module in packed.values and raw[1].any() and not is_one_number:
            changed[module] = True
            packed.tensors[name] = change(raw)
    if not changed:  # a symmetric layout, or one scale: nothing to displace
        assert control != "swapped nibbles"
        return
    try:
        values = read(packed, tmp_path)
    except CheckpointError:
        return
    for module in changed:
        if packed.values[module].shape[0] > 1:
            assert not np.allclose(values[module], packed.values[module], rtol=1e-5), module


def test_weights_keep_what_their_product_has_to_know(tmp_path):
    packed = packers.modelslim()
    checkpoint = Checkpoint.open(packed.write(tmp_path / "modelslim"))
    static = checkpoint.weight("a.static")
    assert (static.input_rule.kind, static.input_rule.offset) == (InputKind.STATIC, -7.0)
    np.testing.assert_allclose(static.bias.numpy(), packed.values["a.static.bias"], rtol=1e-6)
    product = static.scale.numpy()[:, 0] * np.float32(static.input_rule.scale)
    bits = packed.tensors["a.static.deq_scale"][1]
    np.testing.assert_array_equal(product.view("<i4"), bits)
    formats = {"a.down_proj": INT4, "a.W8A8_DYNAMIC": INT8, "a.fp8": FP8_E4M3}
    for module, number_format in formats.items():
        assert checkpoint.weight(module).number_format is number_format
        assert checkpoint.weight(module).input_rule.kind == InputKind.PER_TOKEN
    assert checkpoint.weight("a.W8A16").input_rule == WEIGHT_ONLY
    assert checkpoint.layout.scheme("a.router") is None

    fp8 = Checkpoint.open(packers.block_fp8().write(tmp_path / "fp8")).weight("a.q_proj")
    assert (fp8.block, fp8.input_rule.group_size) == ((128, 128), 128)
    plain = packers.compressed(PLAIN, (6, 88), "int-quantized", TENSOR)
    rule = Checkpoint.open(plain.write(tmp_path / "plain")).weight("a.q_proj").input_rule
    assert (rule.kind, rule.scale, rule.offset) == (InputKind.STATIC, 0.25, -3.0)
    w4a8 = packers.compressed(SYMMETRIC, inputs=TOKEN).write(tmp_path / "w4a8")
    assert Checkpoint.open(w4a8).weight("a.q_proj").input_rule == PER_TOKEN


def test_groups_in_order_need_no_index_and_shuffled_ones_keep_it(tmp_path):
    plain = Checkpoint.open(packers.gptq().write(tmp_path / "plain")).weight("a.q_proj")
    assert plain.group_index is None
    packed = packers.gptq(shuffled=True)
    shuffled = Checkpoint.open(packed.write(tmp_path / "shuffled")).weight("a.q_proj")
    assert shuffled.group_index.tolist() == packed.tensors["a.q_proj.g_idx"][1].tolist()


def test_a_layout_reads_one_module_from_tensors_alone(tmp_path):
    """As a weight loader has them: in its own order, and sliced for tensor parallelism then."""
    packed = packers.gptq((24, 240), group_size=64, shuffled=True)
    checkpoint = Checkpoint.open(packed.write(tmp_path))
    tensors = {name.rpartition(".")[2]: checkpoint.tensor(name) for name in checkpoint.entries}
    before = {suffix: tensor.clone() for suffix, tensor in tensors.items()}
    weight = checkpoint.layout.read("a.q_proj", tensors)
    expected = packed.values["a.q_proj"]
    np.testing.assert_array_equal(weight.rows(8, 16).dequantize().numpy(), expected[8:16])
    np.testing.assert_array_equal(weight.columns(120, 240).dequantize().numpy(), expected[:, 120:])
    assert all(torch.equal(before[suffix], tensor) for suffix, tensor in tensors.items())
