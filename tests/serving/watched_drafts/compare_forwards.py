"""Runs SGLang's forward of the MTP layer behind this package's, on the same rows: a part of a
server.

The folder $COMPARED gets, as `forwards`, a line for each: its mode, its rows, its requests, whether
it was one compiled call, and whether logits, hidden states, keys and values are those of SGLang:
bit for bit, or up to roundings, of a compiled call, whose compiler orders sums as it likes, and of
one that drops all but the last rows of requests behind their keys, for a product orders its sums by
the number of rows; the keys and values of the dropped rows are SGLang's bit for bit. A chain that
is drafted at once, whose mode is CHAIN, is drafted again one by one by such forwards. While the
folder has a file `mistake` the positions of a forward are one too high.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.ops import drafts as operators
from sglang_ascend.plugin.cpu import layers
from sglang_ascend.speculative.forwards import Rows

FOLDER = Path(os.environ["COMPARED"])
# Of some twenty operators, in each dtype.
ROUNDINGS = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-5}


def written(forward_batch: Any) -> list[torch.Tensor]:
    """Keys and values in the slots of the rows."""
    # A draft model's pool has one layer.
    buffers = get_attn_backend().token_to_kv_pool.get_kv_buffer(0)
    return [buffer[forward_batch.out_cache_loc] for buffer in buffers]


def are_close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> bool:
    """Within this share of the largest number. Logits of what must not be drafted are -inf."""
    are_numbers = expected.isfinite()
    if not torch.equal(found.isfinite(), are_numbers):
        return False
    found, expected = found[are_numbers].float(), expected[are_numbers].float()
    return bool((found - expected).abs().max() <= limit * expected.abs().max())


def compare(original: Any, drafts: Any, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
    """Around ``Drafts.__call__``."""
    is_mistaken, calls = (FOLDER / "mistake").exists(), []
    of_layer = operators.latent_layer

    def latent_layer(*given: Any, **sizes: Any) -> torch.Tensor:
        calls.append(given)
        return of_layer(*given, **sizes)

    with patch.object(operators, "latent_layer", latent_layer):
        ours = original(drafts, input_ids, positions + int(is_mistaken), forward_batch)
    found = ours.next_token_logits, ours.hidden_states, *written(forward_batch)
    theirs = drafts.of_sglang(input_ids, positions, forward_batch)
    expected = theirs.next_token_logits, theirs.hidden_states, *written(forward_batch)
    last_rows = layers._last_rows(forward_batch)
    are_cut = last_rows is not None and len(input_ids) > layers.Drafts.most_whole_rows
    limit = ROUNDINGS[ours.hidden_states.dtype] if calls or are_cut else 0.0
    are_equal = all(are_close(*pair, limit) for pair in zip(found, expected, strict=True))
    if are_cut:
        is_dropped = torch.ones(len(input_ids), dtype=torch.bool)
        is_dropped[last_rows] = False
        pairs = zip(found[2:], expected[2:], strict=True)
        are_equal &= all(torch.equal(a[is_dropped], b[is_dropped]) for a, b in pairs)
    mode, batch_size = forward_batch.forward_mode.name, len(forward_batch.seq_lens)
    with (FOLDER / "forwards").open("a") as file:
        file.write(f"{mode} {len(input_ids)} {batch_size} {bool(calls)} {are_equal}\n")
    return ours


def compare_chain(
    original: Any, forwards: Any, ahead: Any, metadata: Any, tokens: torch.Tensor, hidden: Any
) -> Any:
    """Around ``MTPForwards.chain``: each draft must be a likeliest one, up to roundings."""
    ours = original(forwards, ahead, metadata, tokens, hidden)
    if ours is None:
        return None
    buffers = forwards.models.draft.token_to_kv_pool.get_kv_buffer(0)
    found, are_equal = [buffer[ahead.slots] for buffer in buffers], True
    for j, drafted in enumerate(ours):
        of_row = replace(metadata, kv_lens=ahead.kv_lens[j], query_len=1)
        rows = Rows(ahead.positions[j], ahead.slots[j], of_row)
        logits, hidden = forwards.mtp(rows, tokens, hidden)
        behind = logits.amax(dim=1) - logits.gather(1, drafted[:, None])[:, 0]
        limit = ROUNDINGS[hidden.dtype]
        are_equal &= bool((behind <= limit * logits.abs().amax(dim=1)).all())
        tokens = drafted
    expected = [buffer[ahead.slots] for buffer in buffers]
    are_equal &= all(are_close(*pair, limit) for pair in zip(found, expected, strict=True))
    with (FOLDER / "forwards").open("a") as file:
        file.write(f"CHAIN {ours.numel()} {len(tokens)} True {are_equal}\n")
    return ours


def install() -> None:
    HookRegistry.register(
        "sglang_ascend.plugin.mtp.forwards.MTPForwards.chain", compare_chain, HookType.AROUND
    )
    HookRegistry.register(
        "sglang_ascend.plugin.cpu.layers.Drafts.__call__", compare, HookType.AROUND
    )
