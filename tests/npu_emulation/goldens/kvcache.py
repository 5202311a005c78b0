"""Writes into caches by slot."""

from __future__ import annotations

from torch import Tensor

from npu_emulation.goldens.registry import UnsupportedArgumentError, golden


def write_slots(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """cache [blocks, size, ...] as rows; rows [tokens, ...]; negative slots are not written."""
    slots = slots.flatten().long()
    written = slots >= 0
    cache.view(-1, *cache.shape[2:])[slots[written]] = rows.view(-1, *cache.shape[2:])[written]


@golden("npu::npu_scatter_nd_update_")
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """input[indices[i]] = updates[i]; indices' last dimension names the first of input."""
    places = tuple(indices.long().unbind(-1))
    input[places] = updates.view(*indices.shape[:-1], *input.shape[indices.shape[-1] :])
    return input


@golden("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cache_mode: str = "PA_NZ",
) -> None:
    if cache_mode != "Norm":
        raise UnsupportedArgumentError(
            f"npu_scatter_pa_kv_cache with cache_mode={cache_mode!r} is not emulated; pass 'Norm'."
        )
    write_slots(key_cache, key, slot_mapping)
    write_slots(value_cache, value, slot_mapping)


@golden("atb::_npu_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    write_slots(key_cache, key, slot_indices)
    write_slots(value_cache, value, slot_indices)
