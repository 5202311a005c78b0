"""A request's `sampling_seed` (`seed` in the OpenAI API), honoured without a flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_ascend.ops import sampling
from sglang_ascend.plugin.device import serves_on_cpu

_SEEDS = 2**62


def hash_on_any_device(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """For SGLang's ``murmur_hash32``, which asks for sgl_kernel on CPU."""
    return sampling.murmur_hash32(seed, positions, col_indices)


def draw_in_float32(
    logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """For SGLang's ``multinomial_with_seed``: torch_npu casts to float32 for its float64."""
    return sampling.race_by_seed(logprobs, seed, positions)[:, None]


def seed_rows(
    info: SamplingBatchInfo, cls: type, batch: Any, vocab_size: int
) -> SamplingBatchInfo | None:
    """After ``SamplingBatchInfo.from_schedule_batch``: rows get seeds if any request brought one;
    the others get one that nobody knows."""
    given = [req.sampling_params.sampling_seed for req in batch.reqs]
    if all(seed is None for seed in given):
        return None
    drawn = torch.randint(_SEEDS, (len(given),)).tolist()
    seeds = [new if seed is None else seed for seed, new in zip(given, drawn, strict=True)]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def seed_both_or_neither(self: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    """Before ``SamplingBatchInfo.merge_batch``, which joins two tensors or keeps the one."""
    for info, partner in ((self, other), (other, self)):
        if info.sampling_seed is None and partner.sampling_seed is not None:
            info.sampling_seed = torch.randint(_SEEDS, (len(info),), device=info.device)


def draw_by_token(
    sample: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """Around ``top_k_top_p_min_p_sampling_from_probs_torch``, for rows with seeds, and on CPU.

    Core hashes a token's rank where some request of the batch asks for a filter, and its id where
    none does, so that a seed would draw other tokens in other company; and it asserts on min-p.
    On CPU it spends more on sorting a vocabulary than a small model on its layers.
    """
    if return_filtered_probs or (sampling_seed is None and not serves_on_cpu()):
        return sample(
            probs,
            top_ks,
            top_ps,
            min_ps,
            need_min_p_sampling,
            sampling_seed,
            positions,
            return_filtered_probs=return_filtered_probs,
            max_top_k=max_top_k,
        )
    unscaled = torch.ones_like(top_ps)[:, None]
    kept = sampling.filter_probs(probs.log(), unscaled, top_ks, top_ps, min_ps)
    if sampling_seed is None:
        coins = torch.rand(len(kept), dtype=torch.float64)
        return sampling.draw(kept, coins).to(torch.int32)
    return sampling_from_probs_torch(kept, sampling_seed, positions)
