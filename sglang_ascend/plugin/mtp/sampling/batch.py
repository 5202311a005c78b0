"""How the requests of one batch draw, and which of them end with what was drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_ascend.ops import sampling
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.mtp.ranks import accepted_of_first_rank, draw_of_first_rank
from sglang_ascend.plugin.mtp.sampling import rows_of
from sglang_ascend.plugin.mtp.sampling.lossy_acceptance import RelaxedInThinking
from sglang_ascend.plugin.mtp.sampling.thinking_budgets import RequestBudgets, asks_budgets
from sglang_ascend.plugin.requests.draft_heads.lists import RequestLists
from sglang_ascend.plugin.requests.penalties import RequestPenalties, asks_penalties, ending_tokens
from sglang_ascend.sampling.lossy import Relaxed, Threshold, emit
from sglang_ascend.sampling.noise import Decision, exponential, uniform
from sglang_ascend.speculative.drawn import with_certain
from sglang_ascend.speculative.step import StepResult


@dataclass(frozen=True)
class SamplingParts:
    """What samples on a server, whatever the batch."""

    sampler: Any  # SGLang's, which plain decode uses
    penalties: RequestPenalties
    budgets: RequestBudgets
    draft_vocabulary: torch.Tensor | None  # int64, the tokens that a draft can be; None for all
    lists: RequestLists | None  # what drafts can be by request; None: one head, for every request
    draws_drafts: bool  # verification asks what distribution a draft was drawn from
    draws_as_core: bool  # rows without seeds are drawn by ``sampler``; its draw waits on an NPU
    threshold: Threshold | None  # lossy policies, None unless the operator asked for one
    relaxed: RelaxedInThinking | None

    @property
    def have_whole_head(self) -> bool:
        """Whether its columns are the target's vocabulary, for every request."""
        return self.draft_vocabulary is None and self.lists is None

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """What is counted of each request's reply begins."""
        if asks_penalties(batch):
            self.penalties.prefill(batch)
        if asks_budgets(batch):
            self.budgets.prefill(batch)
        if self.relaxed is not None:
            self.relaxed.prefill(batch)
        if self.lists is not None:
            self.lists.before_prefill(batch)

    def propose_likeliest(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draft tokens of one row per request, int64 [batch] of the target's vocabulary."""
        return self.as_tokens(sampling.greedy(logits))

    def as_tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Tokens of the target's vocabulary, of columns of the draft head."""
        return columns if self.draft_vocabulary is None else self.draft_vocabulary[columns]


def make_sampling_parts(
    target_worker: Any, draft_worker: Any, lossy: Threshold | Relaxed | None, draws_drafts: bool
) -> SamplingParts:
    """Of a server whose models are loaded."""
    runner, device = target_worker.model_runner, draft_worker.device
    num_rows = len(runner.req_to_token_pool.req_to_token)
    if draft_worker.lists is not None:
        draft_worker.lists.reserve(num_rows)
    return SamplingParts(
        sampler=runner.sampler,
        penalties=RequestPenalties(num_rows, target_worker.model_config.vocab_size, device),
        budgets=RequestBudgets(num_rows, device),
        draft_vocabulary=draft_worker.hot_token_id,
        lists=draft_worker.lists,
        draws_drafts=draws_drafts,
        draws_as_core=device_profile().draws_as_core,
        threshold=lossy if isinstance(lossy, Threshold) else None,
        relaxed=RelaxedInThinking(lossy, target_worker.tokenizer, num_rows, device)
        if isinstance(lossy, Relaxed)
        else None,
    )


class BatchSampling:
    """``speculative.step.Sampling`` of one ScheduleBatch whose chains have K drafts.

    A decision goes by the position of the token before the one decided, as in plain decode: row
    and draft j of a request decide what follows the token at ``seq_len + j``.
    """

    def __init__(
        self, parts: SamplingParts, batch: ScheduleBatch, width: int, grammar_barrier: Any
    ) -> None:
        self.parts, self.batch, self.width = parts, batch, width
        self.info: SamplingBatchInfo = batch.sampling_info
        self.grammar_barrier = grammar_barrier
        self.draws_drafts = parts.draws_drafts and not self.info.is_all_greedy
        # As ``asks_penalties`` and ``asks_budgets``, whose files other steps do not enter.
        self.is_penalized = self.info.acc_additive_penalties is not None
        self.has_budgets = self.info.has_custom_logit_processor
        # Of the chain that this step drafts, one [batch, tokens that a draft can be] each.
        self.next_draft_probs: list[torch.Tensor] = []
        self._grammar_tree: GrammarTree | None = None

    @cached_property
    def draft_probs(self) -> torch.Tensor | None:
        """float [batch, K, vocab_size]; 0 for tokens that a draft cannot be.

        A draft that was not drawn has a point mass: those behind a prompt, the repetitions that
        make a chain longer, and a lookup. None for a chain without drafts, whose row is drawn as
        plain decode draws it.
        """
        if not self.draws_drafts or self.width == 1:
            return None
        probs, vocabulary = (
            self.batch.spec_info.drawn_from(self.width - 1),
            self.parts.draft_vocabulary,
        )
        if probs is None or vocabulary is not None:
            shape = (*self._drafts.shape, self.info.vocab_size)
            everywhere = torch.zeros(shape, device=self._drafts.device)
            probs = everywhere if probs is None else everywhere.index_copy_(-1, vocabulary, probs)
        return with_certain(probs, self._drafts)

    @property
    def lossy_rule(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
        if self.draws_drafts:
            return None if self.parts.threshold is None else self._accept_above_threshold
        return None if self.parts.relaxed is None else self._accept_relaxed

    def read_chain(self, candidates: torch.Tensor) -> None:
        """Starts the device-to-host copy that grammars need."""
        self._drafts = candidates[:, 1:]
        if self.batch.has_grammar:
            self._grammar_tree = GrammarTree.from_linear_chain(candidates)

    def adjust(self, logits: torch.Tensor, candidates: torch.Tensor) -> None:
        """Penalties, bias, grammar and thinking budget of each request, row by row, in place."""
        if self.is_penalized:
            terms = self.parts.penalties.along_chain(self.batch, candidates)
            terms.apply(self._by_request(logits))
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
        if self.has_budgets:
            self.parts.budgets.apply(self.batch, self._by_request(logits), candidates)

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draws every row as the sampler of plain decode does: same filters, same seeds."""
        return self._draw_rows(logits, positions).view(-1, self.width)

    def _draw_rows(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.info.is_all_greedy:
            return sampling.greedy(logits)
        if self.info.sampling_seed is None and not self.parts.draws_as_core:
            probs = rows_of.probabilities(logits, self.info, self.width)
            return sampling.sample(probs, exponential(None, positions, probs.shape[1]))
        rows = rows_of.expand(self.info, self.width)
        probs = torch.softmax(logits / rows.temperatures, dim=-1)
        tokens, _ = self.parts.sampler._sample_from_probs(
            probs, rows, positions, not rows_of.filters(rows)
        )
        return tokens.long()

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return self._by_request(rows_of.probabilities(logits, self.info, self.width))

    def uniforms(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seeds = self.info.sampling_seed
        seeds = None if seeds is None else seeds.repeat_interleave(self.width)
        judging, drawing = (
            uniform(seeds, positions, decision).view(-1, self.width)
            for decision in (Decision.ACCEPT, Decision.BONUS)
        )
        return judging[:, :-1], drawing

    def commit(
        self, candidates: torch.Tensor, sampled: torch.Tensor, accept_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.info.is_all_greedy:
            sampled, accept_lens = accepted_of_first_rank(sampled, accept_lens)
        if self.is_penalized:
            self.parts.penalties.commit(self.batch, candidates, accept_lens)
        if self.has_budgets:
            self.parts.budgets.advance(self.batch.req_pool_indices, candidates, accept_lens)
        if self.parts.lists is not None:
            rows = self.batch.req_pool_indices
            self.parts.lists.advance(rows, candidates, sampled, accept_lens)
        return sampled, accept_lens

    def propose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draft tokens of one row per request, int64 [batch] of the target's vocabulary.

        The likeliest ones, unless drafts are drawn: then with the request's own bias, temperature
        and filters, so that few drafts are ones which the target cannot draw.
        """
        if not self.draws_drafts:
            return self.parts.propose_likeliest(logits, positions)
        if self.info.logit_bias is not None:
            logits = logits + self._of_draft_vocabulary(self.info.logit_bias)
        probs = rows_of.probabilities(logits, self.info, 1)
        self.next_draft_probs.append(probs)
        noise = uniform(self.info.sampling_seed, positions, Decision.DRAFT)
        return self.parts.as_tokens(draw_of_first_rank(sampling.inverse_cdf(probs, noise)))

    def _accept_above_threshold(
        self, logits: torch.Tensor, candidates: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, drafts = self.probabilities(logits), candidates[:, 1:]
        drafted = drafts[..., None]
        p, q = (of.gather(-1, drafted)[..., 0] for of in (probs[:, :-1], self.draft_probs))
        _, noise = self.uniforms(positions)
        return emit(self.parts.threshold.accepts(p, q), drafts, sampling.inverse_cdf(probs, noise))

    def _accept_relaxed(
        self, logits: torch.Tensor, candidates: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs = torch.softmax(logits / rows_of.expand(self.info, self.width).temperatures, dim=-1)
        drawn = self.draw(logits, positions)
        return self.parts.relaxed.accept(
            self.batch.req_pool_indices, self._by_request(probs), candidates, drawn
        )

    def _by_request(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, self.width, rows.shape[-1])

    def _of_draft_vocabulary(self, columns: torch.Tensor) -> torch.Tensor:
        """[batch, vocab_size] -> [batch, tokens that a draft can be]."""
        vocabulary = self.parts.draft_vocabulary
        return columns if vocabulary is None else columns[:, vocabulary]


class EndedRequests:
    """Those that the last step ended, before the scheduler has processed its result.

    Under overlap scheduling the scheduler launches one step more behind the last of a reply. Where
    the host waits for each step, its tokens are known by then, and that step need not be run.
    """

    def __init__(self) -> None:
        self._seq_lens: dict[Req, int] = {}  # of all of the last step, or of none: one goes on

    def forget(self) -> None:
        self._seq_lens = {}

    def note(self, batch: ScheduleBatch, result: StepResult) -> None:
        """What the step emitted. Reads the device."""
        self.forget()
        emitted = result.sampled.tolist(), result.accept_lens.tolist(), result.new_seq_lens.tolist()
        for req, tokens, accept_len, seq_len in zip(batch.reqs, *emitted, strict=True):
            # The last emitted token is in no cache yet.
            if not ends(req, tokens[:accept_len], seq_len + 1 - len(req.origin_input_ids)):
                return self.forget()
            self._seq_lens[req] = seq_len

    def are_all(self, batch: ScheduleBatch) -> bool:
        """Whether nobody will read what this step emits. Reads the device."""
        if not self._seq_lens or batch.return_logprob or batch.return_hidden_states:
            return False
        # One that was retracted comes back as it was before that step, whose result is dropped.
        return [self._seq_lens.get(req) for req in batch.reqs] == batch.seq_lens.tolist()


def ends(req: Req, tokens: list[int], num_tokens: int) -> bool:
    """Whether SGLang will end the request behind ``tokens``, the last of ``num_tokens`` of its
    reply, by a token or the length: strings, grammars and aborts are left to it."""
    if req.grammar is not None:
        return False
    params = req.sampling_params
    if params.max_new_tokens is not None and num_tokens >= params.max_new_tokens:
        return True
    if params.ignore_eos:
        return False
    return not ending_tokens(req).isdisjoint(tokens)
