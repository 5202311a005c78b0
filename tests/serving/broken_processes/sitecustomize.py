"""Python runs this at start when the folder is on PYTHONPATH: processes that share a request, with
one mistake between them.

$BROKEN_PROCESSES names the mistake; every process of the server gets it.
"""

import os
from collections.abc import Callable
from typing import Any

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


{
    "ranks_draw_apart": ranks_draw_apart,
    "the_draft_is_taken_for_the_token": the_draft_is_taken_for_the_token,
}[os.environ["BROKEN_PROCESSES"]]()
