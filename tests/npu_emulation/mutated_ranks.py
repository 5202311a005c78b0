"""python -m npu_emulation.mutated_ranks MISTAKE ARGUMENTS...: as npu_emulation.serve, and the ranks
make a mistake."""

from __future__ import annotations

import sys
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import dp_attention

from npu_emulation import serve
from sglang_ascend.plugin.mtp import forwards as mtp_forwards
from sglang_ascend.plugin.mtp.sampling import batch as batch_sampling
from sglang_ascend.speculative.captured import CapturedPhases


def no_all_reduce() -> None:
    """Each rank goes on with its own part of a sum."""

    def own_part(group: Any, part: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return part

    GroupCoordinator.all_reduce = own_part


def own_draws() -> None:
    """Each rank keeps what it drew itself."""
    batch_sampling.accepted_of_first_rank = lambda *accepted: accepted


def skipped_drafts() -> None:
    """A rank without requests leaves out the MTP layer's forwards."""
    draft = CapturedPhases.draft

    def skipped(phases: Any, sampled: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
        if len(sampled) == 0:
            return phases.next_candidates[:0]
        return draft(phases, sampled, *lengths)

    CapturedPhases.draft = skipped


def own_choice_of_graph() -> None:
    """Each rank takes the graph that holds its own requests."""
    mtp_forwards.common_batch_size = lambda batch: max(1, len(batch.reqs))


def extend_mode_captured() -> None:
    """A captured forward gathers rows as SGLang's prefill does: all ranks' are summed, and every
    rank gets the sums of all."""
    exchange_rows = mtp_forwards.exchange_rows

    def as_in_prefill(forward_batch: Any, *of_forward: Any) -> None:
        exchange_rows(forward_batch, *of_forward)
        forward_batch.dp_padding_mode = dp_attention.DpPaddingMode.SUM_LEN
        dp_attention.set_dp_buffer_len_from_batch(forward_batch)
        dp_attention.set_is_extend_in_batch(True)

    mtp_forwards.exchange_rows = as_in_prefill


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        no_all_reduce,
        own_draws,
        skipped_drafts,
        own_choice_of_graph,
        extend_mode_captured,
    )
}

if __name__ == "__main__":
    MISTAKES[sys.argv.pop(1)]()
    serve.main()
