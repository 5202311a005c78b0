"""The acceptance of one batch: its logits adjusted as its requests ask, its chains verified."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_ascend.ops import chain, sampling
from sglang_ascend.plugin.ranks import accepted_of_first_rank, draw_of_first_rank
from sglang_ascend.sampling.coins import Decision, toss
from sglang_ascend.sampling.lossy import Threshold, emit

if TYPE_CHECKING:
    from sglang_ascend.plugin.mtp_worker import MTPWorker


class BatchSampling:
    """Target-only verification, or what the server was told to use instead.

    A decision goes by the position of the token before the one decided, as in plain decode: row
    and draft j of a request decide what follows the token at ``seq_len + j``.
    """

    def __init__(self, worker: MTPWorker, batch: ScheduleBatch, grammar_barrier: Any) -> None:
        self.batch = batch
        self.info: SamplingBatchInfo = batch.sampling_info
        self.width = worker.speculative_num_draft_tokens
        self.penalties = worker.penalties
        # Core's own draw without seeds stops the host on an NPU; its distribution is the same.
        self.draws_as_core = worker.draws_as_core
        self.sampler = worker.target_worker.model_runner.sampler
        self.draft_vocabulary = worker.draft_worker.hot_token_id
        self.grammar_barrier = grammar_barrier
        self.lossy, self.relaxed = worker.lossy, worker.relaxed
        self.draws_drafts = worker.draws_drafts and not self.info.is_all_greedy
        # Of the chain that this step verifies, and of the chain that it drafts.
        self.draft_probs: torch.Tensor | None = batch.spec_info.draft_probs
        self.next_draft_probs: list[torch.Tensor] = []
        self._grammar_tree: GrammarTree | None = None

    def read_chain(self, candidates: torch.Tensor) -> None:
        """Before the target's launch: starts the device-to-host copy that grammars need."""
        if self.batch.has_grammar:
            self._grammar_tree = GrammarTree.from_linear_chain(candidates)

    def accept(
        self, logits: torch.Tensor, candidates: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [batch * (K+1), vocab_size], changed in place -> what ``Models.accept`` returns.

        ``positions`` are those of the verified rows, int64 [batch * (K+1)].
        """
        self._adjust(logits, candidates)
        drafts = candidates[:, 1:]
        if self.draws_drafts:
            tokens, accept_lens = self._judge_drawn(logits, drafts, positions)
        elif self.relaxed is not None:
            probs = torch.softmax(logits / _expand(self.info, self.width).temperatures, dim=-1)
            drawn = self._draw(logits, positions).view(-1, self.width)
            tokens, accept_lens = self.relaxed.accept(
                self.batch.req_pool_indices, probs.view(*drawn.shape, -1), candidates, drawn
            )
        else:
            tokens = self._draw(logits, positions).view(-1, self.width)
            accept_lens = chain.verify_chain(tokens, drafts)
        if not self.info.is_all_greedy:
            tokens, accept_lens = accepted_of_first_rank(tokens, accept_lens)
        self.penalties.commit(self.batch, candidates, accept_lens)
        return tokens, accept_lens

    def propose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draft tokens of one row per request, int64 [batch] of the target's vocabulary.

        The likeliest ones, unless drafts are drawn: then with the request's own bias, temperature
        and filters, so that few drafts are ones which the target cannot draw.
        """
        if self.draws_drafts:
            if self.info.logit_bias is not None:
                logits = logits + self._of_draft_vocabulary(self.info.logit_bias)
            probs = _probabilities(logits, self.info, 1)
            self.next_draft_probs.append(probs)
            coins = toss(self.info.sampling_seed, positions, Decision.DRAFT)
            tokens = draw_of_first_rank(sampling.draw(probs, coins))
        else:
            tokens = sampling.greedy(logits)
        return tokens if self.draft_vocabulary is None else self.draft_vocabulary[tokens]

    def _of_draft_vocabulary(self, columns: torch.Tensor) -> torch.Tensor:
        """[batch, vocab_size] -> [batch, tokens that a draft can be]."""
        return columns if self.draft_vocabulary is None else columns[:, self.draft_vocabulary]

    def _adjust(self, logits: torch.Tensor, candidates: torch.Tensor) -> None:
        """Penalties, bias and grammar of each request, row by row, in place."""
        terms = self.penalties.along_chain(self.batch, candidates)
        if terms is not None:
            terms.apply(logits.view(-1, self.width, logits.shape[-1]))
        if self.info.logit_bias is not None:
            logits.add_(self.info.logit_bias.repeat_interleave(self.width, dim=0))
        if self.batch.has_grammar:
            mask = build_grammar_vocab_mask(
                reqs=self.batch.reqs,
                tree=self._grammar_tree,
                sampling_info=self.info,
                device=logits.device,
                barrier=self.grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)

    def _draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draws every row as the sampler of plain decode does: same filters, same seeds."""
        if self.info.is_all_greedy:
            return sampling.greedy(logits)
        if self.info.sampling_seed is None and not self.draws_as_core:
            return sampling.race(_probabilities(logits, self.info, self.width))
        rows = _expand(self.info, self.width)
        probs = torch.softmax(logits / rows.temperatures, dim=-1)
        tokens, _ = self.sampler._sample_from_probs(probs, rows, positions, not _filters(rows))
        return tokens.long()

    def _judge_drawn(
        self, logits: torch.Tensor, drafts: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts that were drawn: rejection sampling, unless a lossy threshold stands for it."""
        vocab_size = logits.shape[-1]
        probs = _probabilities(logits, self.info, self.width).view(-1, self.width, vocab_size)
        draft_probs = self.draft_probs
        if self.draft_vocabulary is not None:
            everywhere = probs.new_zeros(*drafts.shape, vocab_size)
            draft_probs = everywhere.index_copy_(-1, self.draft_vocabulary, draft_probs)
        seeds = self.info.sampling_seed
        seeds = None if seeds is None else seeds.repeat_interleave(self.width)
        accept_coins, draw_coins = (
            toss(seeds, positions, decision).view(-1, self.width)
            for decision in (Decision.ACCEPT, Decision.BONUS)
        )
        if isinstance(self.lossy, Threshold):
            p, q = (of.gather(-1, drafts[..., None])[..., 0] for of in (probs[:, :-1], draft_probs))
            return emit(self.lossy.accepts(p, q), drafts, sampling.draw(probs, draw_coins))
        return chain.verify_by_rejection(
            probs, draft_probs, drafts, accept_coins[:, :-1], draw_coins
        )


def _probabilities(logits: torch.Tensor, info: SamplingBatchInfo, width: int) -> torch.Tensor:
    """What each row's request draws from: [batch * width, vocab_size] -> the same shape."""
    rows = _expand(info, width)
    if not _filters(rows):
        return torch.softmax(logits / rows.temperatures, dim=-1)
    return sampling.filter_probs(logits, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps)


def _expand(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Each request's parameters, once per row."""
    if width == 1:
        return info
    rows = copy.copy(info)
    for name in ("temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed"):
        value = getattr(info, name)
        if value is not None:
            setattr(rows, name, value.repeat_interleave(width, dim=0))
    rows.sampling_mask_batch_indices = None
    return rows


def _filters(info: SamplingBatchInfo) -> bool:
    return info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
