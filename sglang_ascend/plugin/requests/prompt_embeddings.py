"""Prompts that a client sends as embeddings (`input_embeds`)."""

from __future__ import annotations

from typing import Any


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
