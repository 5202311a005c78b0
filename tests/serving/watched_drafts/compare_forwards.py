"""Runs SGLang's forward of the MTP layer before this package's, on the same rows: a part of a
server.

The folder $COMPARED gets, as `forwards`, a line for each: its mode, its rows, its requests, and
whether logits, hidden states, keys and values are those of SGLang bit for bit. While it has a file
`mistake` the positions are one too high.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FOLDER = Path(os.environ["COMPARED"])


def written(forward_batch: Any) -> list[torch.Tensor]:
    """Keys and values in the slots of the rows."""
    # A draft model's pool has one layer.
    buffers = get_attn_backend().token_to_kv_pool.get_kv_buffer(0)
    return [buffer[forward_batch.out_cache_loc] for buffer in buffers]


def compare(original: Any, drafts: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
    """Around ``Drafts.__call__``."""
    theirs = drafts.of_sglang(input_ids, positions, forward_batch)
    expected = theirs.next_token_logits, theirs.hidden_states, *written(forward_batch)
    is_mistaken = (FOLDER / "mistake").exists()
    ours = original(drafts, input_ids, positions + int(is_mistaken), forward_batch)
    found = ours.next_token_logits, ours.hidden_states, *written(forward_batch)
    are_equal = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    mode, batch_size = forward_batch.forward_mode.name, len(forward_batch.seq_lens)
    with (FOLDER / "forwards").open("a") as file:
        file.write(f"{mode} {len(input_ids)} {batch_size} {are_equal}\n")
    return ours


def install() -> None:
    HookRegistry.register(
        "sglang_ascend.plugin.cpu.layers.Drafts.__call__", compare, HookType.AROUND
    )
