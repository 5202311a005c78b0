"""Definition of the products of floats with decoded weights: float32 sums, in any order."""

from __future__ import annotations

import torch

from sglang_ascend.ops.quantized.weights import (
    WeightOnly,
    check_codes,
    check_scale,
    pack_nibbles,
    unpack_nibbles,
)


def prepare_weight_only(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    group_index: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> WeightOnly:
    """A weight for ``weight_only_linear``, or with groups in front for the grouped form.

    Args:
        codes: int8 [(groups,) out, in], within ``bits`` (8 or 4).
        scale: float32 [(groups,) out, ceil(in / group_size)].
        zero: integers or floats in the shape of ``scale``; None for a symmetric weight.
        group_size: columns that one scale covers, None for all; the last may cover fewer.
        group_index: int [in], the scale of each column where they are not in order (GPTQ's g_idx).
        dtype: of the inputs, if it is known: a body may keep its scales in it.

    Raises:
        ValueError: these do not fit each other.
    """
    width = codes.shape[-1]
    check_codes(codes, bits)
    order = None
    if group_index is None:
        group_index = torch.arange(width) // (group_size or width)
        check_scale(scale, (*codes.shape[:-1], -(-width // (group_size or width))))
    elif group_index.shape != (width,):
        raise ValueError(f"group_index is {list(group_index.shape)} for {width} columns.")
    else:
        check_scale(scale, (*codes.shape[:-1], scale.shape[-1]))
        if group_index.min() < 0 or group_index.max() >= scale.shape[-1]:
            raise ValueError(f"group_index names a scale outside of 0..{scale.shape[-1] - 1}.")
        group_index, order = group_index.long().sort(stable=True)
        codes = codes[..., order]
    if zero is not None:
        zero = zero.float().contiguous()
        check_scale(zero, tuple(scale.shape))
    # On the host: a size that depends on values waits for a device.
    columns = group_index.cpu().bincount(minlength=scale.shape[-1])
    are_alike = bool((columns == columns[0]).all())
    return WeightOnly(
        codes=codes.contiguous() if bits == 8 else pack_nibbles(codes),
        scale=scale.contiguous(),
        bits=bits,
        width=width,
        group_size=int(columns[0]) if are_alike else 0,
        starts=torch.nn.functional.pad(columns.cumsum(0), (1, 0)).to(codes.device),
        zero=zero,
        order=order,
    )


def weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b with W = (code - zero) * scale, summed in float32: [..., out], the dtype of ``x``.

    Args:
        x: float [..., in].
        weight: what ``prepare_weight_only`` returned on this device.
        bias: [out], or None. Does not synchronise.
    """
    values = _values(weight, weight.codes, weight.scale, weight.zero)
    of_bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(_ordered(x, weight), values, of_bias).to(x.dtype)


def grouped_weight_only_linear(
    x: torch.Tensor, weight: WeightOnly, counts: torch.Tensor
) -> torch.Tensor:
    """``weight_only_linear`` of each group of rows with the group's own matrix.

    Arguments and result as of ``grouped_integer_linear``. Reads ``counts`` on the host.
    """
    zeros = [None] * len(counts) if weight.zero is None else weight.zero
    parts = []
    for group, rows in enumerate(_ordered(x, weight).split(counts.tolist())):
        values = _values(weight, weight.codes[group], weight.scale[group], zeros[group])
        parts.append(rows @ values.T)
    return torch.cat(parts).to(x.dtype)


def _ordered(x: torch.Tensor, weight: WeightOnly) -> torch.Tensor:
    return x.float() if weight.order is None else x[..., weight.order].float()


def _values(
    weight: WeightOnly, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    codes = codes if weight.bits == 8 else unpack_nibbles(codes, weight.width)
    columns = weight.starts.diff()
    values = codes.float()
    if zero is not None:
        values = values - zero.repeat_interleave(columns, dim=1)
    return values * scale.repeat_interleave(columns, dim=1)
