"""Definition of the product of E4M3 blocks (DeepSeek-V3, arXiv 2412.19437, 3.3.2)."""

from __future__ import annotations

import torch

from sglang_ascend.ops.quantized.weights import BlockFP8Weight

E4M3_MAX = 448.0


def quantize_blocks(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x / scale as E4M3, to nearest even, with scale = max|x| / 448 of ``width`` columns of a row.

    Args:
        x: float [rows, in].

    Returns:
        (float8_e4m3fn [rows, in], float32 [rows, ceil(in / width)]). The last block may be
        narrower; one of zeros has scale 0. Does not synchronise.
    """
    blocks = x.float().split(width, dim=-1)
    scales = [block.abs().amax(dim=-1, keepdim=True) / E4M3_MAX for block in blocks]
    codes = [
        (block / torch.where(scale == 0, 1.0, scale)).clamp(-E4M3_MAX, E4M3_MAX)
        for block, scale in zip(blocks, scales, strict=True)
    ]
    return torch.cat(codes, dim=-1).to(torch.float8_e4m3fn), torch.cat(scales, dim=-1)


def prepare_block_fp8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    quantizes_input: bool = True,
) -> BlockFP8Weight:
    """A weight for ``block_fp8_linear``, or with groups in front for the grouped form.

    Args:
        codes: float8_e4m3fn [(groups,) out, in].
        scale: float32 [(groups,) ceil(out / block[0]), ceil(in / block[1])].
        quantizes_input: the input goes to E4M3 by blocks of block[1] columns of a row; else it is
            multiplied as it is.

    Raises:
        ValueError: these do not fit each other.
    """
    *groups, rows, columns = codes.shape
    expected = [*groups, -(-rows // block[0]), -(-columns // block[1])]
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are float8_e4m3fn, not {codes.dtype}.")
    if scale.dtype != torch.float32 or list(scale.shape) != expected:
        raise ValueError(f"scales are float32 {expected}, not {scale.dtype} {list(scale.shape)}.")
    return BlockFP8Weight(codes=codes, scale=scale, block=block, quantizes_input=quantizes_input)


def block_fp8_linear(
    x: torch.Tensor, weight: BlockFP8Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = sum over blocks of columns of (q_b W_b^T) * input scale_b * weight scale_b, in float32.

    Args:
        x: float [..., in].
        weight: what ``prepare_block_fp8`` returned on this device.
        bias: [out], or None.

    Returns:
        [..., out] in the dtype of ``x``. Does not synchronise.
    """
    rows = x.reshape(-1, x.shape[-1])
    total = _product(rows, weight, weight.codes, weight.scale)
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype).reshape(*x.shape[:-1], total.shape[1])


def grouped_block_fp8_linear(
    x: torch.Tensor, weight: BlockFP8Weight, counts: torch.Tensor
) -> torch.Tensor:
    """``block_fp8_linear`` of each group of rows with the group's own matrix.

    Arguments and result as of ``grouped_integer_linear``. Reads ``counts`` on the host.
    """
    groups = zip(x.split(counts.tolist()), weight.codes, weight.scale, strict=True)
    return torch.cat([_product(rows, weight, *matrix) for rows, *matrix in groups]).to(x.dtype)


def _product(
    x: torch.Tensor, weight: BlockFP8Weight, codes: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, out]."""
    height, width = weight.block
    of_rows = scale.repeat_interleave(height, dim=0)[: len(codes)]
    total = torch.zeros(len(x), len(codes), dtype=torch.float32, device=x.device)
    for index, start in enumerate(range(0, codes.shape[1], width)):
        block = x[:, start : start + width].float()
        row_scale = None
        if weight.quantizes_input:
            quantized, row_scale = quantize_blocks(block, width)
            block = quantized.float()
        product = block @ codes[:, start : start + width].float().T * of_rows[:, index]
        total = total + (product if row_scale is None else product * row_scale)
    return total
