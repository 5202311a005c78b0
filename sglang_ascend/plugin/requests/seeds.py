"""A request's `sampling_seed` (`seed` in the OpenAI API), honoured without a flag."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, _SamplingMaskCapture
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_ascend.ops import sampling
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.npu.order import to_device
from sglang_ascend.sampling import noise

_SEEDS = 2**62


class RequestSeeds:
    """The seeds of a batch's rows, made again only when the batch changes."""

    def __init__(self) -> None:
        self._of_last_batch: tuple[list[Req], torch.Tensor | None] = ([], None)

    def give(self, batch: ScheduleBatch) -> None:
        """Before a forward that samples: rows get seeds if any request brought one; the others get
        one that nobody knows. SGLang gives a forward its own copy of ``sampling_info``, and with
        --enable-deterministic-inference a seed to every row."""
        if batch.sampling_info.sampling_seed is not None:
            return
        requests = list(batch.reqs)  # not their ids, which a client may use again
        if requests != self._of_last_batch[0]:
            self._of_last_batch = requests, _seeds_of(batch)
        if self._of_last_batch[1] is not None:
            batch.sampling_info.sampling_seed = self._of_last_batch[1]


def _seeds_of(batch: ScheduleBatch) -> torch.Tensor | None:
    given = [req.sampling_params.sampling_seed for req in batch.reqs]
    if all(seed is None for seed in given):
        return None
    drawn = torch.randint(_SEEDS, (len(given),)).tolist()
    seeds = [new if seed is None else seed for seed, new in zip(given, drawn, strict=True)]
    device = torch.device(batch.sampling_info.device)
    # A copy to a device from memory that is not pinned stops the host.
    host = torch.tensor(seeds, dtype=torch.int64, pin_memory=device.type != "cpu")
    return to_device(host, device)


class SeededSampler(Sampler):
    """SGLang's sampler, but for rows with seeds and, on a CPU, under filters.

    SGLang hashes a token's rank where some request of the batch asks for a filter, and its id where
    none does, so that a seed would draw other tokens in other company; it asserts on min-p, needs
    sgl_kernel or Triton for the hash, and float64, which an NPU has not. On a CPU it spends more on
    sorting a vocabulary than a small model on its layers.
    """

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> tuple[torch.Tensor, _SamplingMaskCapture | None]:
        seeds = sampling_info.sampling_seed
        filters_here = device_profile().emulates and not simple_sampling_case
        if seeds is None and not filters_here:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        kept = probs if simple_sampling_case else _filtered(probs, sampling_info)
        tokens = draw(kept, seeds, positions)
        rows = sampling_info.sampling_mask_batch_indices
        if rows is None:
            return tokens, None
        weights = kept[rows]
        drawn = weights.gather(1, tokens[rows].long()[:, None])[:, 0]
        capture = _SamplingMaskCapture(
            weights=weights, token_ids=None, selected_weight=drawn, batch_rows=rows
        )
        return tokens, capture


def draw(probs: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """A token of each row, int32 [rows]; ``probs`` [rows, vocab_size] need no sum of 1."""
    if seeds is None:
        uniform = torch.rand(len(probs), dtype=torch.float64)
        return sampling.inverse_cdf(probs, uniform).to(torch.int32)
    drawn_from = noise.exponential(seeds, positions, probs.shape[1])
    return sampling.sample(probs.float(), drawn_from).to(torch.int32)


def _filtered(probs: torch.Tensor, info: Any) -> torch.Tensor:
    unscaled = torch.ones_like(info.top_ps)[:, None]
    return sampling.filter_probs(probs.log(), unscaled, info.top_ks, info.top_ps, info.min_ps)
