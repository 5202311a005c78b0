"""Python runs this at start when the folder is on PYTHONPATH: processes that share a request, with
one mistake between them.

$BROKEN_PROCESSES names the mistake; every process of the server gets it.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

if sys.orig_argv[1:2] == ["-c"]:
    # A process in which inductor tries what the CPU can: nothing is broken in it, and every rank
    # would wait until it has imported SGLang.
    raise ImportError("left alone")

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

manual_seed = torch.manual_seed


def ranks_draw_apart() -> None:
    """Each rank seeds its sampler by itself."""
    torch.manual_seed = lambda seed: manual_seed(seed + os.getpid())


def the_draft_is_taken_for_the_token() -> None:
    """The decode server goes on from what was drafted, not from what was emitted."""

    def build(original: Callable[..., Any], self: Any, batch: Any, tokens: Any, relay: Any) -> Any:
        drafts = torch.stack([req.output_topk_index[1] for req in batch.reqs])
        return original(self, batch, drafts, relay)

    HookRegistry.register(
        "sglang_ascend.plugin.mtp.algorithm.MTPAlgorithm.build_disagg_draft_input",
        build,
        HookType.AROUND,
    )


def an_idle_rank_skips_a_forward() -> None:
    """Without requests a rank leaves its last draft decode out."""

    def mtp(original: Callable[..., Any], self: Any, rows: Any, tokens: Any, *args: Any) -> Any:
        is_idle = not self.forward_batch.seq_lens.any()
        if is_idle and rows.metadata.query_len == 1:
            return torch.zeros(len(tokens), 1), args[0]
        return original(self, rows, tokens, *args)

    HookRegistry.register("sglang_ascend.plugin.mtp.forwards.MTPForwards.mtp", mtp, HookType.AROUND)


def ranks_choose_their_own_rows() -> None:
    """Each rank steps on its own requests, or on one of none, however many the others have."""
    HookRegistry.register(
        "sglang_ascend.plugin.mtp.forwards.common_batch_size",
        lambda batch: max(1, len(batch.reqs)),
        HookType.REPLACE,
    )


{
    "nothing": lambda: None,
    "an_idle_rank_skips_a_forward": an_idle_rank_skips_a_forward,
    "ranks_choose_their_own_rows": ranks_choose_their_own_rows,
    "ranks_draw_apart": ranks_draw_apart,
    "the_draft_is_taken_for_the_token": the_draft_is_taken_for_the_token,
}[os.environ["BROKEN_PROCESSES"]]()
