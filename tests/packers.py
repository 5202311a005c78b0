"""Quantized checkpoints written in plain NumPy from the definitions of their formats: the oracle of
the readers. Nothing of the package is used, nor of torch or safetensors.

A tensor is (dtype of safetensors, array of its bits).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Raw = tuple[str, np.ndarray]
ARCHITECTURE = {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this one of its eight outputs


@dataclass
class Packed:
    """A checkpoint before it is written, and the values [out, in] of its quantized modules."""

    tensors: dict[str, Raw]
    values: dict[str, np.ndarray]
    config: dict[str, Any] = field(default_factory=lambda: dict(ARCHITECTURE))
    files: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        write_safetensors(folder / "model.safetensors", self.tensors)
        return folder


def write_safetensors(path: Path, tensors: dict[str, Raw]) -> None:
    header, offset = {}, 0
    for name, (dtype, array) in tensors.items():
        offsets = [offset, offset + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def f32(values: np.ndarray) -> Raw:
    return "F32", values.astype("<f4")


def f16(values: np.ndarray) -> Raw:
    return "F16", values.astype("<f2")


def bf16(values: np.ndarray) -> tuple[Raw, np.ndarray]:
    """The bits, cut off, and what they mean."""
    bits = values.astype("<f4").view("<u4") >> 16
    return ("BF16", bits.astype("<u2")), (bits << 16).view("<f4")


def i8(codes: np.ndarray) -> Raw:
    return "I8", codes.astype("i1")


def i32(codes: np.ndarray) -> Raw:
    return "I32", codes.astype("<i4")


def i64(codes: np.ndarray) -> Raw:
    return "I64", codes.astype("<i8")


def nibbles(codes: np.ndarray) -> Raw:
    """ModelSlim's: [out / 2, in], the even row below."""
    return i8(((codes[0::2] & 15) | ((codes[1::2] & 15) << 4)).astype("u1").view("i1"))


def named(module: str, tensors: dict[str, Raw]) -> dict[str, Raw]:
    return {f"{module}.{suffix}": raw for suffix, raw in tensors.items()}


def e4m3_table() -> np.ndarray:
    """The value of each byte: sign, four bits of exponent (bias 7), three of mantissa."""
    table = np.empty(256)
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        table[byte] = -value if byte >> 7 else value
    table[[0x7F, 0xFF]] = np.nan
    return table


def words(codes: np.ndarray, bits: int, axis: int) -> Raw:
    """Unsigned codes packed along `axis` into 32-bit words, one by one, lowest bits first."""
    along = np.moveaxis(codes, axis, 0)
    packed = np.zeros((-(-len(along) * bits // 32), *along.shape[1:]), np.uint64)
    for index, row in enumerate(along):
        packed[index * bits // 32] |= row.astype(np.uint64) << np.uint64(index * bits % 32)
    return "I32", np.moveaxis(packed, 0, axis).astype("<u4").view("<i4")


def spread(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """`scale` of blocks as one for each element."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return scale[np.ix_(rows, columns)]


def rotation(size: int) -> np.ndarray:
    """float64 [size, size]: of the odd factor Hartley's matrix, of the power of two Hadamard's with
    signs of its rows, from loops over bits."""
    even = size & -size
    odd = size // even
    angles = np.outer(np.arange(odd), np.arange(odd)) * 2 * np.pi / odd
    signs = [
        [(-1) ** bin(row & column).count("1") for column in range(even)] for row in range(even)
    ]
    of_row = [(-1) ** bin(row & row >> 1).count("1") for row in range(even)]
    right = np.array(of_row)[:, None] * np.array(signs) / even**0.5
    return np.kron((np.cos(angles) + np.sin(angles)) / odd**0.5, right)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.01, 0.1, shape).astype("<f4")


def gptq(
    shape: tuple[int, int] = (16, 64),
    bits: int = 4,
    group_size: int = 32,
    version: str = "gptq",
    shuffled: bool = False,
) -> Packed:
    rng = np.random.default_rng(0)
    out_features, in_features = shape
    group = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // group)
    codes = rng.integers(0, 1 << bits, (in_features, out_features))
    zeros = rng.integers(0, 1 << bits, (num_groups, out_features))
    zeros[0, :3] = 0, 1, (1 << bits) - 1  # 0 is stored as 2**bits - 1 by the first version
    scale = rng.uniform(0.01, 0.1, (num_groups, out_features)).astype("<f2")
    g_idx = np.arange(in_features) // group
    if shuffled:
        rng.shuffle(g_idx)
    values = (codes - zeros[g_idx]).astype("<f4") * scale[g_idx].astype("<f4")
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": shuffled,
        "checkpoint_format": version,
    }
    return Packed(
        {
            "model.norm.weight": f32(np.ones(in_features)),
            **named("a.q_proj", gptq_tensors(codes, zeros, scale, g_idx, bits, version)),
        },
        {"a.q_proj": values.T},
        {**ARCHITECTURE, "quantization_config": settings},
    )


def gptq_tensors(
    codes: np.ndarray,
    zeros: np.ndarray,
    scale: np.ndarray,
    g_idx: np.ndarray,
    bits: int = 4,
    version: str = "gptq",
) -> dict[str, Raw]:
    """Unsigned codes [in, out], zeros and scales [groups, out], the group of each input."""
    stored = zeros if version == "gptq_v2" else (zeros - 1) % (1 << bits)
    return {
        "qweight": words(codes, bits, 0),
        "qzeros": words(stored, bits, 1),
        "scales": ("F16", scale),
        "g_idx": i32(g_idx),
    }


def awq(shape: tuple[int, int] = (16, 64), group_size: int = 32) -> Packed:
    rng = np.random.default_rng(1)
    out_features, in_features = shape
    group = in_features if group_size == -1 else group_size
    num_groups = -(-in_features // group)
    codes = rng.integers(0, 16, (in_features, out_features))
    zeros = rng.integers(0, 16, (num_groups, out_features))
    scale = rng.uniform(0.01, 0.1, (num_groups, out_features)).astype("<f2")
    g_idx = np.arange(in_features) // group
    values = (codes - zeros[g_idx]).astype("<f4") * scale[g_idx].astype("<f4")
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
    }
    return Packed(
        {
            "model.norm.weight": f32(np.ones(in_features)),
            **named("a.q_proj", awq_tensors(codes, zeros, scale)),
        },
        {"a.q_proj": values.T},
        {**ARCHITECTURE, "quantization_config": settings},
    )


def awq_tensors(codes: np.ndarray, zeros: np.ndarray, scale: np.ndarray) -> dict[str, Raw]:
    """Unsigned codes [in, out], zeros and scales [groups, out]."""

    def interleaved(rows: np.ndarray) -> Raw:
        packed = np.zeros((len(rows), rows.shape[1] // 8), np.uint32)
        for column in range(rows.shape[1]):
            nibble = AWQ_ORDER.index(column % 8)
            packed[:, column // 8] |= rows[:, column].astype(np.uint32) << np.uint32(4 * nibble)
        return "I32", packed.view("<i4")

    return {
        "qweight": interleaved(codes),
        "qzeros": interleaved(zeros),
        "scales": ("F16", scale),
    }


def fp8_bytes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.choice([b for b in range(256) if b & 0x7F != 0x7F], shape).astype("u1")


def block_fp8(shape: tuple[int, int] = (200, 240), block: tuple[int, int] = (128, 128)) -> Packed:
    rng = np.random.default_rng(2)
    codes = fp8_bytes(rng, shape)
    scale = scales(rng, -(-shape[0] // block[0]), -(-shape[1] // block[1]))
    values = e4m3_table()[codes].astype("<f4") * spread(scale, shape, block)
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    gate, _ = bf16(rng.normal(size=(4, shape[1])))
    return Packed(
        {
            "a.gate.weight": gate,
            "a.q_proj.weight": ("F8_E4M3", codes),
            "a.q_proj.weight_scale_inv": f32(scale),
        },
        {"a.q_proj": values},
        {**ARCHITECTURE, "quantization_config": settings},
    )


def compressed(
    weights: dict[str, Any],
    shape: tuple[int, int] = (16, 64),
    file_format: str = "pack-quantized",
    inputs: dict[str, Any] | None = None,
    shuffled: bool = False,
) -> Packed:
    """`weights` are compressed-tensors' arguments: num_bits, type, symmetric, strategy, ..."""
    rng, weights = np.random.default_rng(3), dict(weights)
    bits, strategy = weights["num_bits"], weights["strategy"]
    block = {
        "tensor": shape,
        "channel": (1, shape[1]),
        "group": (1, weights.get("group_size")),
        "block": weights.get("block_structure"),
    }[strategy]
    num_blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scale_bits, scale = bf16(scales(rng, *num_blocks))
    g_idx = np.arange(shape[1]) // block[1]
    if shuffled:
        rng.shuffle(g_idx)
    columns = scale[np.arange(shape[0]) // block[0]][:, g_idx]
    name = "a.q_proj"
    tensors = {"model.norm.weight": f32(np.ones(shape[1])), f"{name}.weight_scale": scale_bits}
    if strategy == "tensor":
        tensors[f"{name}.weight_scale"] = "BF16", scale_bits[1].reshape(1)
    if weights["type"] == "float":
        codes = fp8_bytes(rng, shape)
        tensors[f"{name}.weight"] = "F8_E4M3", codes
        values = e4m3_table()[codes].astype("<f4") * columns
    else:
        half = 1 << (bits - 1)
        codes = rng.integers(-half, half, shape)
        zeros = np.zeros(num_blocks, np.int64)
        is_packed = file_format == "pack-quantized"
        if not weights["symmetric"]:
            zeros = rng.integers(-half, half, num_blocks)
            packed_zeros = words(zeros + half, bits, 0) if is_packed else i8(zeros)
            tensors[f"{name}.weight_zero_point"] = packed_zeros
        if is_packed:
            tensors[f"{name}.weight_packed"] = words(codes + half, bits, 1)
            tensors[f"{name}.weight_shape"] = i64(np.array(shape))
        else:
            tensors[f"{name}.weight"] = i8(codes)
        zero_columns = zeros[np.arange(shape[0]) // block[0]][:, g_idx]
        values = (codes - zero_columns).astype("<f4") * columns
    if shuffled:
        tensors[f"{name}.weight_g_idx"] = i32(g_idx)
        weights = {**weights, "actorder": "group"}
    if inputs is not None and not inputs["dynamic"]:
        tensors[f"{name}.input_scale"] = f32(np.array([0.25]))
        tensors[f"{name}.input_zero_point"] = i8(np.array([-3]))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    config = {**ARCHITECTURE, "quantization_config": settings}
    return Packed(tensors, {name: values}, config)


def modelslim(group_size: int = 0, in_features: int = 88) -> Packed:
    """Every type that is read, beside FLOAT; scales of groups where `group_size` is not 0."""
    rng = np.random.default_rng(4)
    shape = (6, in_features)
    num_groups = -(-in_features // group_size) if group_size else 1
    columns = np.arange(in_features) // (group_size or in_features)
    tensors: dict[str, Raw] = {"model.norm.weight": f32(np.ones(in_features))}
    types: dict[str, str] = {}
    values: dict[str, np.ndarray] = {}

    def add(module: str, type_name: str, **held: Raw) -> None:
        tensors.update({f"{module}.{suffix}": raw for suffix, raw in held.items()})
        types.update({f"{module}.{suffix}": type_name for suffix in held})

    for type_name, low, high in (
        ("W8A8_DYNAMIC", -127, 128),
        ("W8A16", -127, 128),
        ("W4A4_DYNAMIC", -8, 8),
    ):
        module = f"a.{type_name}"
        codes, scale = rng.integers(low, high, shape), scales(rng, 6, num_groups)
        offset = rng.integers(-3, 4, (6, num_groups)) if type_name == "W8A16" else scale * 0
        values[module] = (codes - offset[:, columns]).astype("<f4") * scale[:, columns]
        add(module, type_name, weight=i8(codes), weight_scale=f32(scale), weight_offset=f32(offset))
    codes, scale = rng.integers(-127, 128, shape), scales(rng, 6, 1)
    values["a.mix"] = codes.astype("<f4") * scale
    static = {"quant_bias": i32(np.zeros(6)), "deq_scale": f32(scale[:, 0] * 0.5)}
    static |= {"input_scale": f32(np.array([0.5])), "input_offset": f32(np.zeros(1))}
    mix = {"weight": i8(codes), "weight_scale": f32(scale), "weight_offset": f32(scale * 0)}
    add("a.mix", "W8A8_MIX", **mix, **static)
    codes, scale = fp8_bytes(rng, shape), scales(rng, 6, 1)
    values["a.fp8"] = e4m3_table()[codes].astype("<f4") * scale
    fp8 = {
        "weight": ("F8_E4M3", codes),
        "weight_scale": f32(scale),
        "weight_offset": f32(scale * 0),
    }
    add("a.fp8", "WFP8AFP8_DYNAMIC", **fp8)
    add_static(rng, add, values, shape)
    codes, scale = rng.integers(-8, 8, shape), scales(rng, 6, num_groups)
    values["a.down_proj"] = codes.astype("<f4") * scale[:, columns]
    w4a8 = {"weight": nibbles(codes), "weight_offset": f32(np.zeros((6, 1)))}
    w4a8["scale_bias"] = f32(8 * values["a.down_proj"].sum(1, keepdims=True))
    if group_size:
        channel = scales(rng, 6, 1)
        values["a.down_proj"] = codes.astype("<f4") * (channel * scale)[:, columns]
        w4a8["weight_scale"], w4a8["weight_scale_second"] = f32(channel), f32(scale)
        w4a8["weight_offset_second"] = f32(scale * 0)
        w4a8["scale_bias"] = f32(8 * values["a.down_proj"].sum(1, keepdims=True))
    else:
        w4a8["weight_scale"] = f32(scale)
    add("a.down_proj", "W4A8_DYNAMIC", **w4a8)
    add("a.router", "FLOAT", weight=f32(rng.normal(size=(4, in_features))))
    add("a.router", "C8", kv_cache_scale=f32(np.ones(8)))
    types["model.norm.weight"] = "FLOAT"
    description = {**types, "version": "1.0.0", "model_quant_type": "W8A8", "metadata": {}}
    description |= {"group_size": group_size, "optional": {}}
    return Packed(tensors, values, files={"quant_model_description.json": description})


def add_static(rng: np.random.Generator, add: Any, values: dict, shape: tuple[int, int]) -> None:
    """W8A8: y = (q(x) @ codes + quant_bias) * deq_scale; with the bits of deq_scale and without."""
    for module, is_bits in (("a.static", True), ("a.static_bf16", False)):
        codes, scale = rng.integers(-127, 128, shape), scales(rng, 6)
        input_scale, offset = np.float32(rng.uniform(0.01, 0.1)), np.float32(-7)
        deq_scale = scale * input_scale
        bias = rng.normal(size=6)
        quant_bias = np.round(bias / deq_scale - codes.sum(1) * offset)
        values[module] = codes.astype("<f4") * scale[:, None]
        add(
            module,
            "W8A8",
            weight=i8(codes),
            quant_bias=i32(quant_bias),
            input_scale=f32(np.array([input_scale])),
            input_offset=f32(np.array([offset])),
            deq_scale=i64(deq_scale.view("<i4")) if is_bits else f32(deq_scale),
        )
        values[f"{module}.bias"] = (quant_bias + codes.sum(1) * offset) * deq_scale


def swap_nibbles(raw: Raw) -> Raw:
    dtype, array = raw
    data = np.ascontiguousarray(array).view("u1")
    return dtype, ((data >> 4) | (data << 4)).view(array.dtype)


def displace(raw: Raw) -> Raw:
    dtype, array = raw
    is_transposed = array.ndim == 2 and dtype == "F16"  # GPTQ and AWQ: [groups, out]
    return dtype, np.roll(array, 1, axis=1 if is_transposed else 0)


def forget(raw: Raw) -> Raw:
    dtype, array = raw
    return dtype, np.full_like(array, 0x88888888 - (1 << 32) if dtype == "I32" else 0)


# Of a reader: the tensors that it reads wrongly, and how.
MISTAKES = {
    "swapped nibbles": (("qweight", "weight_packed", "weight"), swap_nibbles),
    "scale off by one row": (
        ("scales", "weight_scale_inv", "weight_scale", "deq_scale", "weight_scale_second"),
        displace,
    ),
    "zero point left out": (("qzeros", "weight_zero_point", "weight_offset"), forget),
}
