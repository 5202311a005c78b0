"""Quantized checkpoints of nano-deepseek in every layout, and what they mean in float.

Written here and in ``packers`` from the definitions, so that neither the package's solvers nor its
writers are asked. A symmetric weight: code = round(w / scale), scale = max|w| / largest code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import packers
import torch
from packers import Raw, f32, i8, i32, i64
from safetensors.torch import load_file, save_file

QUANTIZED = re.compile(r"_proj(_with_mqa)?\.weight$")
# MLA multiplies kv_b_proj by itself, and eh_proj joins two inputs: published recipes leave both.
FLOAT = re.compile(r"kv_b_proj|eh_proj")
# The layout whose head is quantized too.
WITH_HEAD = "W8A16 and head"
METADATA = {"version": "1.0.0", "metadata": {}, "group_size": 0, "optional": {}}
DESCRIPTION = "quant_model_description.json"
GROUP = 64  # ragged in 96 and 240 columns
EVEN_GROUP = 16  # compressed-tensors' groups divide the columns
FP8_BLOCK = (128, 128)
# Static scales of attention's inputs, about what calibration finds, with an offset.
STATIC_OFFSET = -3.0
STATIC_SCALES = {
    "q_a_proj": 0.04, "kv_a_proj_with_mqa": 0.04, "q_b_proj": 0.04, "o_proj": 0.19,
}  # fmt: skip

# Writes a checkpoint once for each layout and set of options.
Write = Callable[..., Path]
# The tensors of a linear by suffix, and the values [out, in] that they stand for.
Packed = tuple[dict[str, Raw], np.ndarray]


@dataclass(frozen=True)
class Kind:
    """One kind of quantized linear: how it is stored, and how it rounds its input."""

    pack: Callable[[np.ndarray], Packed]
    round_input: Callable[[torch.Tensor], torch.Tensor] | None = None
    type_name: str = ""  # ModelSlim's


@dataclass(frozen=True)
class Layout:
    """The kinds of a checkpoint's linears, and its quantization_config (ModelSlim has none).

    Attributes:
        by_name: of linears by their last name, where it is not ``linears``.
    """

    linears: Kind
    experts: Kind
    settings: dict[str, Any] | None = None
    by_name: Mapping[str, Kind] = field(default_factory=dict)

    def kind(self, module: str) -> Kind:
        if ".experts." in module:
            return self.experts
        return self.by_name.get(module.rpartition(".")[2], self.linears)


def round_per_token(x: torch.Tensor, largest: int = 127) -> torch.Tensor:
    """float64 [..., in], int8 by row."""
    scale = x.abs().amax(-1, keepdim=True) / largest
    return (x / scale).round() * scale


def round_static(x: torch.Tensor, scale: float) -> torch.Tensor:
    codes = (x / scale + STATIC_OFFSET).round().clamp(-128, 127)
    return (codes - STATIC_OFFSET) * scale


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 columns of a row."""
    blocks = x.split(FP8_BLOCK[1], dim=-1)
    scales = [block.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448 for block in blocks]
    pairs = zip(blocks, scales, strict=True)
    return torch.cat([(block / s).to(torch.float8_e4m3fn).double() * s for block, s in pairs], -1)


def rounded(weight: np.ndarray, largest: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales [out, 1])"""
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(largest)
    return np.round(weight / scale), scale


def rounded_in_groups(
    weight: np.ndarray, g_idx: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0..15 [in, out], zeros and float16 scales [groups, out], values [out, in]."""
    groups = [weight[:, g_idx == group] for group in range(g_idx.max() + 1)]
    low = np.stack([group.min(1) for group in groups])
    scale = (np.stack([group.max(1) for group in groups]) - low) / 15
    scale = np.maximum(scale, 1e-5).astype("<f2")
    zeros = np.clip(np.round(-low / scale), 0, 15)
    codes = np.clip(np.round(weight.T / scale[g_idx]) + zeros[g_idx], 0, 15)
    values = (codes - zeros[g_idx]).astype("<f4") * scale[g_idx].astype("<f4")
    return codes.astype(int), zeros.astype(int), scale, values.T


def pack_int8(weight: np.ndarray) -> Packed:
    codes, scale = rounded(weight)
    tensors = {"weight": i8(codes), "weight_scale": f32(scale), "weight_offset": f32(scale * 0)}
    return tensors, codes.astype("<f4") * scale


def pack_int4(weight: np.ndarray) -> Packed:
    codes, scale = rounded(weight, 7)
    values = codes.astype("<f4") * scale
    tensors = {"weight": packers.nibbles(codes.astype(int)), "weight_scale": f32(scale)}
    tensors["weight_offset"] = f32(scale * 0)
    tensors["scale_bias"] = f32(8 * values.sum(1, keepdims=True))
    return tensors, values


def pack_static(weight: np.ndarray, input_scale: float) -> Packed:
    """The deq_scale of a model that was float16: the bits of a float32."""
    codes, scale = rounded(weight)
    deq_scale = (scale[:, 0] * np.float32(input_scale)).astype("<f4")
    tensors = {
        "weight": i8(codes),
        "quant_bias": i32(-codes.sum(1) * STATIC_OFFSET),
        "deq_scale": i64(deq_scale.view("<i4")),
        "input_scale": f32(np.array([input_scale])),
        "input_offset": f32(np.array([STATIC_OFFSET])),
    }
    return tensors, codes.astype("<f4") * scale


def pack_rotated(weight: np.ndarray, largest: int) -> Packed:
    """Codes of the rotated weight; the values are turned back."""
    turn = packers.rotation(weight.shape[1])
    codes, scale = rounded((weight @ turn).astype("<f4"), largest)
    tensors = {"weight": i8(codes), "weight_scale": f32(scale), "weight_offset": f32(scale * 0)}
    return tensors, codes * scale @ turn.T


def round_rotated(x: torch.Tensor, largest: int) -> torch.Tensor:
    turn = torch.from_numpy(packers.rotation(x.shape[-1]))
    return round_per_token(x @ turn, largest) @ turn.T


def pack_gptq(weight: np.ndarray, shuffled: bool = False) -> Packed:
    g_idx = np.arange(weight.shape[1]) // GROUP
    if shuffled:  # the parts of a fused projection have one order, as they have one input
        np.random.default_rng(weight.shape[1]).shuffle(g_idx)
    codes, zeros, scale, values = rounded_in_groups(weight, g_idx)
    return packers.gptq_tensors(codes, zeros, scale, g_idx), values


def pack_awq(weight: np.ndarray) -> Packed:
    g_idx = np.arange(weight.shape[1]) // GROUP
    codes, zeros, scale, values = rounded_in_groups(weight, g_idx)
    return packers.awq_tensors(codes, zeros, scale), values


def pack_words(weight: np.ndarray) -> Packed:
    """compressed-tensors' int4 in groups."""
    groups = weight.reshape(len(weight), -1, EVEN_GROUP)
    scale = np.abs(groups).max(2) / np.float32(7)
    codes = np.round(groups / scale[..., None]).astype(int).reshape(weight.shape)
    tensors = {
        "weight_packed": packers.words(codes + 8, 4, 1),
        "weight_shape": i64(np.array(weight.shape)),
        "weight_scale": f32(scale),
    }
    return tensors, codes.astype("<f4") * scale.repeat(EVEN_GROUP, 1)


def pack_plain(weight: np.ndarray) -> Packed:
    """compressed-tensors' int8 per channel."""
    tensors, values = pack_int8(weight)
    del tensors["weight_offset"]
    return tensors, values


def e4m3(values: np.ndarray) -> np.ndarray:
    """The bytes."""
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def pack_channel_fp8(weight: np.ndarray) -> Packed:
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    codes = e4m3(weight / scale)
    values = packers.e4m3_table()[codes].astype("<f4") * scale
    return {"weight": ("F8_E4M3", codes), "weight_scale": f32(scale)}, values


def pack_block_fp8(weight: np.ndarray) -> Packed:
    padded = [
        -(-size // block) * block for size, block in zip(weight.shape, FP8_BLOCK, strict=True)
    ]
    whole = np.zeros(padded, "<f4")
    whole[: weight.shape[0], : weight.shape[1]] = np.abs(weight)
    blocks = whole.reshape(padded[0] // FP8_BLOCK[0], FP8_BLOCK[0], -1, FP8_BLOCK[1])
    scale = blocks.max((1, 3)) / np.float32(448)
    spread = packers.spread(scale, weight.shape, FP8_BLOCK)  # pyright: ignore[reportArgumentType]
    codes = e4m3(weight / spread)
    values = packers.e4m3_table()[codes].astype("<f4") * spread
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": f32(scale)}, values


def hif8_numbers() -> dict[float, int]:
    """Code of every number above 0, by the widths of exponent and fraction that its size gets."""
    found = {2.0 ** (code - 23): code for code in range(1, 8)}
    for exponent in range(-15, 16):
        size = abs(exponent)
        bits = max(size.bit_length(), 0)  # of |exponent| with its leading 1, which is implied
        prefix, width = {0: (1, 3), 1: (1, 3), 2: (1, 3), 3: (2, 2), 4: (3, 1)}[bits]
        field = (exponent < 0) << (bits - 1) | size - (1 << (bits - 1)) if bits else 0
        prefix <<= bits
        for fraction in range(1 << width):
            number = 2.0**exponent * (1 + fraction / (1 << width))
            found[number] = (prefix | field) << width | fraction
    del found[1.5 * 2.0**15]  # infinity
    return found


def pack_hif8(weight: np.ndarray) -> Packed:
    table = hif8_numbers()
    numbers = np.array(sorted(table))
    codes = np.array([0, *(table[number] for number in numbers)], "u1")
    numbers = np.concatenate([[0.0], numbers])
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(15)
    places = np.abs(np.abs(weight / scale)[..., None] - numbers).argmin(-1)
    signs = np.where((weight < 0) & (places > 0), 0x80, 0).astype("u1")
    values = np.sign(weight) * numbers[places].astype("<f4") * scale
    return {"weight": ("U8", codes[places] | signs), "weight_scale": f32(scale)}, values


def pack_mxfp4(weight: np.ndarray) -> Packed:
    groups = weight.reshape(len(weight), -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(2))) - 2
    scaled = groups / 2.0 ** exponent[..., None]
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    places = np.abs(np.abs(scaled)[..., None] - numbers).argmin(-1)
    codes = (places | (groups < 0) << 3).reshape(weight.shape).astype("u1")
    values = np.sign(groups) * numbers[places] * 2.0 ** exponent[..., None]
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scale = (exponent + 127).astype("u1")
    return {"weight": ("U8", packed), "weight_scale": ("U8", scale)}, values.reshape(weight.shape)


def compressed(weights: dict[str, Any], file_format: str, inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*kv_b_proj$", "re:.*eh_proj$", "re:.*mlp.gate$"],
    }


INT8_CHANNEL = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
INT4_GROUPS = {**INT8_CHANNEL, "num_bits": 4, "strategy": "group", "group_size": EVEN_GROUP}
FP8_CHANNEL = {**INT8_CHANNEL, "type": "float"}
PER_TOKEN = {**INT8_CHANNEL, "strategy": "token", "dynamic": True}
FP8_SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GPTQ_SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}

DYNAMIC = Kind(pack_int8, round_per_token, "W8A8_DYNAMIC")
WEIGHT_ONLY = Kind(pack_int8, None, "W8A16")
ROTATED = {
    bits: Kind(partial(pack_rotated, largest=n), partial(round_rotated, largest=n), name)
    for bits, n, name in (
        (8, 127, "W8A8_DYNAMIC_ROTATED"),
        (4, 7, "W4A4_DYNAMIC_ROTATED"),
    )
}
HIF8 = Kind(pack_hif8, None, "W8A16_HIF8")
MXFP4 = Kind(pack_mxfp4, None, "W4A16_MXFP4")
STATIC = {
    name: Kind(partial(pack_static, input_scale=scale), partial(round_static, scale=scale), "W8A8")
    for name, scale in STATIC_SCALES.items()
}
LAYOUTS = {
    "W8A8_DYNAMIC": Layout(DYNAMIC, DYNAMIC),
    "W8A16": Layout(WEIGHT_ONLY, WEIGHT_ONLY),
    WITH_HEAD: Layout(WEIGHT_ONLY, WEIGHT_ONLY),
    "W4A8": Layout(DYNAMIC, Kind(pack_int4, round_per_token, "W4A8_DYNAMIC")),
    "W8A8 rotated": Layout(ROTATED[8], ROTATED[8]),
    "W4A4": Layout(ROTATED[8], ROTATED[4]),
    "W8A8 static": Layout(DYNAMIC, DYNAMIC, by_name=STATIC),
    "HiFloat8": Layout(HIF8, HIF8),
    # 240 columns are no multiple of 32.
    "MXFP4": Layout(MXFP4, MXFP4, by_name={"o_proj": WEIGHT_ONLY}),
    "gptq": Layout(
        Kind(lambda weight: pack_gptq(weight, shuffled=True)), Kind(pack_gptq), GPTQ_SETTINGS
    ),
    "awq": Layout(Kind(pack_awq), Kind(pack_awq), AWQ_SETTINGS | {"zero_point": True}),
    "compressed int4": Layout(
        Kind(pack_words), Kind(pack_words), compressed(INT4_GROUPS, "pack-quantized")
    ),
    "compressed int8": Layout(
        Kind(pack_plain, round_per_token),
        Kind(pack_plain, round_per_token),
        compressed(INT8_CHANNEL, "int-quantized", PER_TOKEN),
    ),
    "compressed fp8": Layout(
        Kind(pack_channel_fp8), Kind(pack_channel_fp8), compressed(FP8_CHANNEL, "float-quantized")
    ),
    "block fp8": Layout(
        Kind(pack_block_fp8, round_to_e4m3),
        Kind(pack_block_fp8, round_to_e4m3),
        FP8_SETTINGS | {"weight_block_size": list(FP8_BLOCK)},
    ),
}


def write_quantized(
    source: Path,
    folder: Path,
    layout: str,
    *,
    target: bool = True,
    mtp: bool = True,
    mtp_scales_of_layer: int | None = None,
    mistake: str | None = None,
    mistaken: str = "model.layers.1.self_attn.o_proj",
) -> Path:
    """``layout`` for the target's linears, the MTP layer's, or both.

    ``mtp_scales_of_layer`` and ``mistake`` are wrong: the MTP layer is stored with the scales of
    that layer, and one of ``packers.MISTAKES`` is made in the module ``mistaken``.
    """
    tensors: dict[str, Raw] = {}
    types: dict[str, str] = {}
    weights = load_file(source / "model.safetensors")
    mtp_layer = _mtp_layer(source)
    for name, weight in weights.items():
        module, is_mtp = name.removesuffix(".weight"), name.startswith(mtp_layer)
        if not is_quantized(name, layout) or not (mtp if is_mtp else target):
            tensors[name], types[name] = _raw(weight), "FLOAT"
            continue
        kind = LAYOUTS[layout].kind(module)
        packed = kind.pack(weight.float().numpy())[0]
        if is_mtp and mtp_scales_of_layer is not None:
            other = weights[name.replace(mtp_layer, f"model.layers.{mtp_scales_of_layer}.")]
            packed["weight_scale"] = kind.pack(other.float().numpy())[0]["weight_scale"]
        if mistake is not None and module == mistaken:
            suffixes, change = packers.MISTAKES[mistake]
            packed = {key: change(raw) if key in suffixes else raw for key, raw in packed.items()}
        tensors |= packers.named(module, packed)
        types |= dict.fromkeys(packers.named(module, packed), kind.type_name)
    _copy_settings(source, folder)
    packers.write_safetensors(folder / "model.safetensors", tensors)
    settings = LAYOUTS[layout].settings
    if settings is None:
        (folder / DESCRIPTION).write_text(json.dumps({**METADATA, **types}))
    else:
        config = json.loads((folder / "config.json").read_text())
        written = json.dumps(config | {"quantization_config": settings})
        (folder / "config.json").write_text(written)
    return folder


def write_decoded(source: Path, folder: Path, layout: str) -> Path:
    """The float32 checkpoint of the same values, for transformers."""
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight.float()
        if is_quantized(name, layout):
            values = (
                LAYOUTS[layout].kind(name.removesuffix(".weight")).pack(weights[name].numpy())[1]
            )
            weights[name] = torch.from_numpy(np.ascontiguousarray(values, "<f4"))
    _copy_settings(source, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def is_quantized(name: str, layout: str) -> bool:
    if name == "lm_head.weight":
        return layout == WITH_HEAD
    return bool(QUANTIZED.search(name)) and not FLOAT.search(name)


def _raw(tensor: torch.Tensor) -> Raw:
    if tensor.dtype == torch.bfloat16:
        return "BF16", tensor.view(torch.uint16).numpy()
    return f32(tensor.numpy())


def _mtp_layer(source: Path) -> str:
    config = json.loads((source / "config.json").read_text())
    return f"model.layers.{config['num_hidden_layers']}."


def _copy_settings(source: Path, folder: Path) -> None:
    folder.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
