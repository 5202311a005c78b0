"""The reserve of a decode step is what an overlapped step can reach, and no more.

SGLang's own allocation runs beside the step's own operators, on one request; every position that is
not allocated is poisoned.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from sglang_ascend.ops import chain

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

POISON = -1
PROMPT_LEN = 21


def reserve_of(num_steps: int) -> int:
    """As SGLang asks for it: the algorithm says half."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    server_args = SimpleNamespace(speculative_num_draft_tokens=num_steps + 1)
    mtp = SpeculativeAlgorithm.from_string("MTP")
    return 2 * mtp.resolve_max_speculative_num_draft_tokens(server_args)


def spare_slots(num_steps: int, reserve: int, page_size: int, accepted: Iterable[int]) -> int:
    """Allocated slots past the last one that a step used, of the tightest step; negative is the
    number of poisoned ones that it used."""
    from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens

    kv = SimpleNamespace(kv_committed_len=PROMPT_LEN, kv_allocated_len=PROMPT_LEN)
    table = torch.full((1, 1000), POISON)
    seq_len, unseen, spare = PROMPT_LEN, 0, table.numel()
    for accept_len in accepted:
        _, (kv.kv_allocated_len,), _ = page_aligned_decode_alloc_lens(
            [SimpleNamespace(kv=kv)], reserve=reserve, page_size=page_size
        )
        table[0, : kv.kv_allocated_len] = torch.arange(kv.kv_allocated_len)
        inputs = chain.prepare_step(
            torch.tensor([seq_len]),
            torch.tensor([0]),
            table,
            torch.arange(2 * num_steps),
            seq_len + 2 * num_steps,
        )
        seq_len += accept_len
        rows = chain.place_draft_decode(
            torch.tensor([seq_len]),
            torch.tensor([accept_len]),
            inputs.slots,
            torch.arange(num_steps)[:, None],
        )
        used = {*inputs.row_slots.tolist(), *rows.slots.flatten().tolist()}
        poisoned = {*inputs.positions.tolist(), *rows.positions.flatten().tolist()} - used
        spare = min(spare, kv.kv_allocated_len - 1 - max(used) if not poisoned else -len(poisoned))
        # Overlap: the host sees what a step accepted after it has prepared the next one.
        kv.kv_committed_len += unseen
        unseen = accept_len
    return spare


def ragged(num_steps: int) -> list[int]:
    rng = random.Random(num_steps)
    return [rng.choice((1, num_steps + 1, rng.randint(1, num_steps + 1))) for _ in range(40)]


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("num_steps", range(1, 16))
def test_no_step_uses_a_slot_that_is_not_allocated(num_steps: int, page_size: int) -> None:
    for accepted in (ragged(num_steps), [num_steps + 1] * 12, [1] * 12):
        assert spare_slots(num_steps, reserve_of(num_steps), page_size, accepted) >= 0


@pytest.mark.parametrize("num_steps", range(1, 16))
def test_whole_chains_one_after_another_use_the_reserve_up(num_steps: int) -> None:
    """But for the slot that an odd 3K+1 gains because SGLang doubles half of it."""
    spare = spare_slots(num_steps, reserve_of(num_steps), 1, [num_steps + 1] * 12)
    assert spare == (3 * num_steps + 1) % 2


@pytest.mark.parametrize("num_steps", range(2, 16))
def test_a_shorter_reserve_is_overrun(num_steps: int) -> None:
    """The control: one slot less than 3K+1, and the 2K+2 of SGLang's own order."""
    whole = [num_steps + 1] * 12
    assert spare_slots(num_steps, 3 * num_steps, 1, whole) == -1
    assert spare_slots(num_steps, 2 * num_steps + 2, 1, whole) == 1 - num_steps
