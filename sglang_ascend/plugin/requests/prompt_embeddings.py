"""Prompts that a client sends as embeddings (`input_embeds`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch


def pass_embeddings(
    kwargs: dict[str, Any], self: Any, forward_batch: Any, pp_proxy_tensors: Any
) -> dict[str, Any]:
    """After ``ModelRunner._extend_forward_kwargs``: in the dtype of the model, to the target only.

    An MTP layer embeds ids; of such a prompt it gets ids that stand for nothing, and drafts badly
    until tokens come.
    """
    if forward_batch.input_embeds is not None:
        del kwargs["input_embeds"]
        if not self.is_draft_worker:
            kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
    return kwargs


def embed_other_prompts(batch: ScheduleBatch, model: Any) -> None:
    """Before the forward of prompts: rows for those that brought ids, where SGLang has only rows of
    those that brought embeddings."""
    given = batch.input_embeds
    if given is None or len(given) == len(batch.input_ids):
        return
    brought = [
        torch.full((length,), req.input_embeds is not None)
        for req, length in zip(batch.reqs, batch.extend_lens, strict=True)
    ]
    rows = model.model.embed_tokens(batch.input_ids)
    batch.input_embeds = rows.index_put((torch.cat(brought).to(rows.device),), given.to(rows.dtype))
