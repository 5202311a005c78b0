"""Definitions of the chain operators: prepare a step once, accept a chain, place its draft
decodes, look a chain up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ascend.ops.sampling.reference import inverse_cdf


@dataclass(frozen=True)
class StepInputs:
    """What every forward of a step is told, made once from device lengths.

    The verified rows are bonus and chain, K+1 per request, from position ``seq_len`` on. The
    step's draft decodes reach K-1 positions past them: ``slots`` covers both, 2K of them or, where
    nothing is drafted, one.
    """

    positions: torch.Tensor  # int64 [batch * (K+1)], of the verified rows, request-major
    row_slots: torch.Tensor  # int64 [batch * (K+1)], KV slot of each verified row
    slots: torch.Tensor  # int64 [batch, max(1, 2K)], slots of the positions from seq_len on
    kv_lens: torch.Tensor  # int64 [batch], seq_len + K+1
    block_table: torch.Tensor  # int64 [batch, max_kv_len / page_size], page of every position
    page_size: int


@dataclass(frozen=True)
class DraftDecodeInputs:
    """Draft decode j (row j-1) runs at the j-th position after the committed tokens."""

    positions: torch.Tensor  # int64 [K-1, batch]
    slots: torch.Tensor  # int64 [K-1, batch]
    kv_lens: torch.Tensor  # int64 [K-1, batch], including the row itself


def prepare_step(
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    offsets: torch.Tensor,
    max_kv_len: int,
    page_size: int = 1,
) -> StepInputs:
    """Positions, slots, lengths and block table of one step. Does not synchronise.

    Args:
        seq_lens: int64 [batch], committed tokens of each request (first free position).
        req_pool_indices: int [batch], row of each request in ``req_to_token``.
        req_to_token: int [rows, max_context_len], position -> KV slot. Read here only, so the
            scheduler may write the next step's slots while this one runs.
        offsets: int64 [max(1, 2K)], 0, 1, 2, ...; K is the number of drafted tokens.
        max_kv_len: host bound, at least seq_len + 2K of every request.
        page_size: consecutive slots that are allocated together; 1 makes the block table one of
            slots. Behind a request's own pages, those of seq_len + 2K positions, the table has 0,
            and the list is not read: it is as long as the model's context.
    """
    num_draft_tokens = len(offsets) // 2 + 1
    listed = req_to_token[req_pool_indices, :max_kv_len].long()
    window = seq_lens[:, None] + offsets
    slots = listed.gather(1, window)
    pages = listed[:, ::page_size] // page_size
    first_positions = torch.arange(0, max_kv_len, page_size, device=listed.device)
    is_own = first_positions <= window[:, -1:]
    return StepInputs(
        positions=window[:, :num_draft_tokens].reshape(-1),
        row_slots=slots[:, :num_draft_tokens].reshape(-1),
        slots=slots,
        kv_lens=seq_lens + num_draft_tokens,
        block_table=pages * is_own,
        page_size=page_size,
    )


def verify_chain(sampled: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Accepts the longest prefix of a drafted chain that the target drew itself.

    Row j of ``sampled`` is drawn from the target's distribution after draft tokens 1..j. While
    draft j+1 equals sampled j the chain is the target's own continuation; the first sampled token
    that differs (or the one after a fully accepted chain) is the bonus. Each emitted token is thus
    drawn from the target given the tokens before it: the output has the target's distribution
    exactly, greedy being the special case of a point mass (Leviathan et al., arXiv 2211.17192,
    with a deterministic draft: q is a point mass, so min(1, p/q) is p(draft)).

    Args:
        sampled: int [batch, K+1], target draws of the K+1 verified rows.
        draft_tokens: int [batch, K], the drafted chain.

    Returns:
        int32 [batch] in 1..K+1, kept tokens including the bonus. Does not synchronise.
    """
    return keep_prefix(draft_tokens == sampled[:, :-1])


def keep_prefix(accepted: torch.Tensor) -> torch.Tensor:
    """Kept tokens of a chain whose drafts were judged one by one, the bonus included.

    bool [batch, K] -> int32 [batch] in 1..K+1: a draft is kept while all before it are.
    """
    return accepted.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32) + 1


def verify_by_rejection(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    accept_uniform: torch.Tensor,
    draw_uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Draft j was drawn from q_j; it is kept with probability min(1, p_j(draft) / q_j(draft)). The
    first one rejected is replaced by a draw from norm(max(p_j - q_j, 0)); behind a chain that is
    kept whole the bonus is drawn from p. Every emitted token then has distribution p, whatever q.

    Args:
        target_probs: float [batch, K+1, vocab_size], p after draft tokens 1..j.
        draft_probs: float [batch, K, vocab_size], q; 0 for tokens that the draft cannot propose.
        draft_tokens: int64 [batch, K], drawn from ``draft_probs``.
        accept_uniform, draw_uniform: float64 [batch, K] and [batch, K+1], uniform in [0, 1).

    Returns:
        (int64 [batch, K+1], of which the first accept_lens of a row are emitted;
        int32 [batch] in 1..K+1). Does not synchronise.
    """
    drafted = draft_tokens[..., None]
    p = target_probs[:, :-1].gather(-1, drafted)[..., 0]
    q = draft_probs.gather(-1, drafted)[..., 0]
    accept_lens = keep_prefix(accept_uniform * q < p)
    last = (accept_lens - 1).long()[:, None]
    residual = (target_probs[:, :-1] - draft_probs).clamp_min(0)
    # p = q up to rounding leaves no residual, and is all but never rejected; p then stands for it.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs[:, :-1])
    weights = torch.cat([residual, target_probs[:, -1:]], dim=1)
    weights = weights.gather(1, last[..., None].expand(-1, -1, weights.shape[-1]))[:, 0]
    bonus = inverse_cdf(weights, draw_uniform.gather(1, last)[:, 0])
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1)).scatter(1, last, bonus[:, None])
    return tokens, accept_lens


def place_draft_decode(
    new_seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
) -> DraftDecodeInputs:
    """Where the K-1 draft decodes go: behind the committed tokens, in the step's own slots.

    Args:
        new_seq_lens: int64 [batch], seq_len + accept_len.
        accept_lens: int [batch], in 1..K+1, or 0 behind a prompt, whose chain is still drafted.
        slots: int64 [batch, 2K], as ``prepare_step`` gave them.
        offsets: int64 [K, 1], 0, 1, 2, ...

    Returns:
        rows of draft decode j = 1..K-1. Does not synchronise.
    """
    # A row is one position past the tokens before it, so row j+1's position is row j's length.
    positions = new_seq_lens + offsets
    return DraftDecodeInputs(
        positions=positions[:-1],
        slots=slots.t().gather(0, accept_lens + offsets[:-1]),
        kv_lens=positions[1:],
    )


def look_up(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    num_drafts: int,
    min_match: int,
    max_match: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt lookup: drafts what followed the last n tokens of a request where they stood before.

    Of all earlier places where the last token stands, that with the most equal tokens before it
    counts, up to ``max_match``; of such places the last one. What follows it may reach the end,
    and then goes on with its own drafts: a text of period p is continued with period p.

    Args:
        tokens: int [rows, max_len], the tokens of each request from its first on.
        rows: int [batch], row of each request in ``tokens``.
        lens: int64 [batch], known tokens of each request, at least 1.
        num_drafts: drafts of each request.
        min_match, max_match: equal tokens that are asked for at least, and looked at at most.

    Returns:
        (int64 [batch, num_drafts]; int64 [batch], the equal tokens found, in min_match..max_match,
        or 0 where there is no such place and the drafts repeat the last token).
        Does not synchronise.
    """
    known = tokens[rows].long()
    places = torch.arange(known.shape[1], device=known.device)
    matched = torch.zeros_like(known)
    agrees = (places < lens[:, None] - 1).long()
    for n in range(max_match):
        wanted = known.gather(1, (lens[:, None] - 1 - n).clamp_min(0))
        shifted = known.roll(n, dims=1)
        agrees = agrees * ((shifted == wanted) & (places >= n))
        matched += agrees
    # The most equal tokens first, then the last place.
    best = (matched * known.shape[1] + places).argmax(dim=1)
    length = matched.gather(1, best[:, None])[:, 0]
    is_found = length >= min_match
    start = torch.where(is_found, best + 1, lens - 1)
    period = lens - start
    following = start[:, None] + torch.arange(num_drafts, device=known.device) % period[:, None]
    return known.gather(1, following), torch.where(is_found, length, 0)


def extend_context(
    ring: torch.Tensor,
    num_written: torch.Tensor,
    is_unlisted: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    num_kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Remembers the last unlisted tokens of each request, and gives all that are remembered.

    Args:
        ring: int64 [rows, most], in place: unlisted token n of a request in column n % most.
        num_written: int64 [rows], in place: unlisted tokens of each request.
        is_unlisted: bool [vocab_size].
        rows: int [batch], distinct: row of each request.
        tokens: int64 [batch, width], width <= most.
        num_kept: int [batch], of ``tokens`` the first so many follow those before.

    Returns:
        int64 [n] each: places in ``rows``, ascending, and a token of that request, from its ring's
        first column on. Synchronises.
    """
    columns = torch.arange(ring.shape[1], device=ring.device)
    is_new = is_unlisted[tokens] & (columns[: tokens.shape[1]] < num_kept[:, None])
    written = num_written[rows][:, None] + is_new.cumsum(dim=1)
    of_row = rows[:, None].expand_as(tokens)
    ring[of_row[is_new], (written - 1)[is_new] % ring.shape[1]] = tokens[is_new]
    num_written[rows] = written[:, -1]
    is_held = columns < num_written[rows][:, None]
    return is_held.nonzero()[:, 0], ring[rows][is_held]
