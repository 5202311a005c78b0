"""Definitions of the chain operators: where a window of tokens lives, how much of it to keep."""

from __future__ import annotations

import torch


def window_slots(
    starts: torch.Tensor, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, width: int
) -> torch.Tensor:
    """Slots of the ``width`` tokens that follow each request's committed tokens.

    Args:
        starts: int [batch], committed tokens of each request (first free position).
        req_pool_indices: int [batch], row of each request in ``req_to_token``.
        req_to_token: int [rows, max_context_len], position -> KV slot.
        width: tokens per request.

    Returns:
        int64 [batch * width], request-major. Does not synchronise.
    """
    offsets = torch.arange(width, device=starts.device)
    positions = starts.long()[:, None] + offsets
    return req_to_token[req_pool_indices.long()[:, None], positions].reshape(-1).long()


def verify_chain(
    sampled: torch.Tensor, draft_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the longest prefix of a drafted chain that the target drew itself.

    Row j of ``sampled`` is drawn from the target's distribution after draft tokens 1..j. While
    draft j+1 equals sampled j the chain is the target's own continuation; the first sampled token
    that differs (or the one after a fully accepted chain) is the bonus. Each emitted token is thus
    drawn from the target given the tokens before it: the output has the target's distribution
    exactly, greedy being the special case of a point mass (Leviathan et al., arXiv 2211.17192,
    with a deterministic draft: q is a point mass, so min(1, p/q) is p(draft)).

    Args:
        sampled: int [batch, num_draft_tokens], target draws of the K+1 verified rows.
        draft_tokens: int [batch, num_draft_tokens - 1], the drafted chain.

    Returns:
        accept_lens: int32 [batch] in 1..K+1, kept tokens including the bonus.
        accept_index: int32 [batch, K+1], flat row of each kept token, -1 past accept_lens.
        Does not synchronise.
    """
    batch_size, num_draft_tokens = sampled.shape
    matches = (draft_tokens == sampled[:, :-1]).to(torch.int32)
    accept_lens = 1 + matches.cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    rows = torch.arange(
        batch_size * num_draft_tokens, dtype=torch.int32, device=sampled.device
    ).view(batch_size, num_draft_tokens)
    columns = rows[:1] if batch_size else rows
    accept_index = torch.where(columns < accept_lens[:, None], rows, -1)
    return accept_lens, accept_index
