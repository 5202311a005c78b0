"""Runs SGLang's forward of the MTP layer behind this package's, on the same rows: a part of a
server.

The folder $COMPARED gets, as `forwards`, a line for each: its mode, its rows, its requests, whether
it was one compiled call, and whether logits, hidden states, keys and values are those of SGLang bit
for bit. A compiled call multiplies heads by this package's operator, which sums in another order
than PyTorch's: there SGLang's forward is given the same. While the folder has a file `mistake` the
positions are one too high.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.ops import drafts as operators
from sglang_ascend.ops import linear

FOLDER = Path(os.environ["COMPARED"])


def written(forward_batch: Any) -> list[torch.Tensor]:
    """Keys and values in the slots of the rows."""
    # A draft model's pool has one layer.
    buffers = get_attn_backend().token_to_kv_pool.get_kv_buffer(0)
    return [buffer[forward_batch.out_cache_loc] for buffer in buffers]


class TorchWithOurHeads:
    """PyTorch as SGLang's latent attention sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def bmm(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None) -> Any:
        products = linear.by_head(x.transpose(0, 1), weights.contiguous()).transpose(0, 1)
        return products if out is None else out.copy_(products)


def compare(original: Any, drafts: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
    """Around ``Drafts.__call__``."""
    is_mistaken, calls = (FOLDER / "mistake").exists(), []
    of_layer = operators.latent_layer

    def latent_layer(*given: Any, **sizes: Any) -> torch.Tensor:
        calls.append(operators.latent_layer)
        return of_layer(*given, **sizes)

    with patch.object(operators, "latent_layer", latent_layer):
        ours = original(drafts, input_ids, positions + int(is_mistaken), forward_batch)
    found = ours.next_token_logits, ours.hidden_states, *written(forward_batch)
    with patch.object(forward_mla, "torch", TorchWithOurHeads() if calls else torch):
        theirs = drafts.of_sglang(input_ids, positions, forward_batch)
    expected = theirs.next_token_logits, theirs.hidden_states, *written(forward_batch)
    are_equal = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    mode, batch_size = forward_batch.forward_mode.name, len(forward_batch.seq_lens)
    with (FOLDER / "forwards").open("a") as file:
        file.write(f"{mode} {len(input_ids)} {batch_size} {bool(calls)} {are_equal}\n")
    return ours


def install() -> None:
    HookRegistry.register(
        "sglang_ascend.plugin.cpu.layers.Drafts.__call__", compare, HookType.AROUND
    )
