"""python -m npu_emulation.mutated_mtp MISTAKE ARGUMENTS...: npu_emulation.serve with a mistake in
MTP's step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from npu_emulation import serve
from npu_emulation.counters import late_copies
from npu_emulation.goldens import rotary
from npu_emulation.mutated import no_wait_for_results
from sglang_ascend.attention.metadata import StepMetadata
from sglang_ascend.env import TRUST_COPY_ORDER
from sglang_ascend.ops import chain
from sglang_ascend.plugin.mtp import forwards as mtp_forwards
from sglang_ascend.plugin.mtp import refusals as mtp_refusals
from sglang_ascend.plugin.mtp import target as mtp_target
from sglang_ascend.plugin.mtp import worker as mtp_worker
from sglang_ascend.plugin.npu import scheduling as npu_scheduling
from sglang_ascend.speculative import captured


def swapped_block_table() -> None:
    """The first two requests of a batch read each other's pages."""

    def swapped(prepared: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_step(*args: Any) -> Any:
            inputs = prepared(*args)
            table = inputs.block_table
            return replace(inputs, block_table=torch.cat((table[1:2], table[:1], table[2:])))

        return prepare_step

    chain.prepare_step = swapped(chain.prepare_step)


def one_row_too_few() -> None:
    """K rows of each request are verified, and not K+1."""
    _verify_with(lambda metadata: replace(metadata, query_len=metadata.query_len - 1))


def mask_off_by_one() -> None:
    """Each verified row sees the next one too."""
    _verify_with(lambda metadata: replace(metadata, kv_lens=metadata.kv_lens + 1))


def _verify_with(mistaken: Callable[[StepMetadata], StepMetadata]) -> None:
    run = mtp_forwards.run_model

    def run_model(runner: Any, metadata: StepMetadata, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            metadata = mistaken(metadata)
        return run(runner, metadata, forward_batch)

    mtp_forwards.run_model = run_model


def lengths_of_the_first_step() -> None:
    """The captured step's lengths are not written again while the requests stay the same."""
    fill = captured.StepBuffers.fill

    def stale(buffers: Any, candidates: torch.Tensor, requests: Any) -> None:
        first = buffers.seq_lens.clone() if buffers._num_filled == len(candidates) else None
        fill(buffers, candidates, requests)
        if first is not None:
            buffers.seq_lens.copy_(first)

    captured.StepBuffers.fill = stale


def one_buffer_for_lengths() -> None:
    """The lengths of a page's request are written where the last ones may still be copied from."""
    os.environ[TRUST_COPY_ORDER.name] = "1"  # a copy that is waited for has read it
    buffers: dict[int, torch.Tensor] = {}

    def tensor(lengths: list[list[int]], **kwargs: Any) -> torch.Tensor:
        made = torch.tensor(lengths, **kwargs)
        return buffers.setdefault(made.shape[1], made).copy_(made)

    npu_scheduling.torch = SimpleNamespace(tensor=tensor, int32=torch.int32)  # pyright: ignore


def late_copies_of_lengths() -> None:
    """No mistake: the lengths of a page's request land when the host waits for them."""
    copy = npu_scheduling.to_device

    def to_device(host: torch.Tensor, device: Any) -> torch.Tensor:
        with late_copies():
            return copy(host, device)

    npu_scheduling.to_device = to_device


def trusted_copies_of_lengths() -> None:
    """They land late, and nobody waits."""
    os.environ[TRUST_COPY_ORDER.name] = "1"
    late_copies_of_lengths()


def a_wait_in_every_step() -> None:
    """Tokens are right, and the host waits for the device to have them."""
    step = mtp_worker.speculative_step

    def waiting(*args: Any) -> Any:
        result = step(*args)
        result.accept_lens[0].item()
        return result

    mtp_worker.speculative_step = waiting


def gate_that_normalizes_twice() -> None:
    """SGLang's call of CANN's gate, which CANN 8.5 refuses."""
    mtp_target.leave_norm_to_the_gate = lambda model: None


def prolog_without_norm() -> None:
    """The fused prolog writes latents that it has not normalized."""
    rotary.normalized = lambda x, gamma, epsilon: (x, torch.ones(()))


def prolog_swaps_halves() -> None:
    """It writes the second elements of the rotated pairs of a key before the first."""
    turn = rotary.interleave_rope
    rotary.interleave_rope = lambda x, cos, sin: turn(x, cos, sin).roll(x.shape[-1] // 2, -1)


def prolog_beside_another_prefill() -> None:
    """It is not refused where SGLang's prefill leaves the elements of a pair side by side."""
    mtp_refusals.refuse_unserved_attention = lambda server_args: None


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        swapped_block_table,
        one_row_too_few,
        mask_off_by_one,
        lengths_of_the_first_step,
        one_buffer_for_lengths,
        late_copies_of_lengths,
        trusted_copies_of_lengths,
        no_wait_for_results,
        a_wait_in_every_step,
        gate_that_normalizes_twice,
        prolog_without_norm,
        prolog_swaps_halves,
        prolog_beside_another_prefill,
    )
}

if __name__ == "__main__":
    MISTAKES[sys.argv.pop(1)]()
    serve.main()
