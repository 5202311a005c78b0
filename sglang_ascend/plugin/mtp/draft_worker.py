"""SGLang's draft worker slot: the MTP layer beside the target, on its slots and positions."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_disagg, get_parallel, get_spec
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from sglang_ascend.plugin.cpu.layers import PreparedHead
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.mtp.disaggregation import (
    carry_draft_cache,
    fill_transfer,
    keep_indices_on_host,
)
from sglang_ascend.plugin.npu.models import make_capturable
from sglang_ascend.plugin.quantization.head import QuantizedHead
from sglang_ascend.plugin.requests.draft_heads.lists import ListedHeads, RequestLists
from sglang_ascend.plugin.requests.weight_updates import (
    cut_head,
    follow_head,
    separate_head,
    share_embedding_and_head,
    share_quantized_head,
)
from sglang_ascend.speculative.lengths import lengthened
from sglang_ascend.speculative.skipped import SkippedRows
from sglang_ascend.speculative.vocabulary.file import DraftVocabulary, read_vocabulary

logger = logging.getLogger(__name__)


class MTPDraftWorker(EagleDraftWorker):
    """Loads and places the MTP layer as EAGLE does; the draft vocabulary is ours."""

    is_separate_model = False  # and so of several layers, without states of the target
    lists: RequestLists | None = None  # None: one head drafts every request
    skipped: SkippedRows | None = None  # takes the rows of the prefill, which drafts nothing

    def init_token_map(self) -> None:
        """The checkpoint's own draft vocabulary."""
        model_config = self.draft_runner.model_config
        found = read_vocabulary(Path(model_config.model_path), model_config.vocab_size)
        if found is not None and get_parallel().tp_size > 1:
            # A rank holds a slice of the head's rows, and every slice must be as long.
            logger.info("Drafts use the full vocabulary, for the head is split between ranks.")
            found = None
        self.hot_token_id = None
        self.vocabulary = found
        if found is not None and not self._drafts_by_request(found, model_config.vocab_size):
            self.hot_token_id = found.token_ids.to(self.device)

    def _drafts_by_request(self, vocabulary: DraftVocabulary, vocab_size: int) -> bool:
        target_head = self.target_worker.model_runner.model.lm_head
        needs = {
            "a CPU": not device_profile().captures_step,
            "one server for prefill and decode": get_disagg().disaggregation_mode == "null",
            "logits in the head's dtype": isinstance(
                target_head.quant_method, PreparedHead | QuantizedHead
            ),
        }
        if missing := [need for need, is_met in needs.items() if not is_met]:
            logger.info(
                "One head of %d tokens drafts all requests: tokens of a request's own text, and "
                "heads by language, need %s.",
                len(vocabulary.token_ids),
                " and ".join(missing),
            )
            return False
        self.lists = RequestLists(vocabulary, vocab_size)
        sizes = [f"{one.name} {len(one.token_ids)}" for one in vocabulary.languages]
        listed = ", ".join(sizes) or f"a list of {len(vocabulary.token_ids)}"
        logger.info("Each request drafts tokens of its own text and of %s.", listed)
        return True

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        with _deterministic_drafts():
            super().alloc_memory_pool(*args, **kwargs)
        if get_disagg().disaggregation_mode == "decode":
            runner = self.draft_runner
            carry_draft_cache(runner.token_to_kv_pool_allocator, runner.token_to_kv_pool)

    def init_lm_head(self) -> None:
        """Shares the target's embedding and head, of the head the draft vocabulary's rows."""
        model = self.draft_runner.model
        separate_head(model)
        embedding, head = self._resolve_shared_embed_and_head()
        method = self.target_worker.model_runner.model.lm_head.quant_method
        if self.lists is not None:
            share_embedding_and_head(model, embedding, head)
            target_head = self.target_worker.model_runner.model.lm_head
            vocab_size = self.draft_runner.model_config.vocab_size
            heads = ListedHeads(self.lists, self.vocabulary, vocab_size, target_head)
            follow_head(model, heads)
        elif isinstance(method, QuantizedHead):
            share_embedding_and_head(model, embedding, head)
            share_quantized_head(model, method, self.hot_token_id)
        elif self.hot_token_id is None:
            share_embedding_and_head(model, embedding, head)
        else:
            cut_head(model, embedding, head, self.hot_token_id)
        if device_profile().captures_step:
            make_capturable(model)

    def init_attention_backend(self) -> None:
        """Every forward of the MTP layer runs on its runner's own backend."""
        self.draft_extend_attn_backend = None
        self.draft_attn_backend = self.draft_runner.attn_backend
        self.draft_runner.draft_attn_backend = self.draft_attn_backend

    def _capture_cuda_graphs(self) -> None:
        """What is captured is the step, which has the MTP layer's forwards in it."""
        self.cuda_graph_runner = None
        self.cuda_graph_runner_for_draft_extend = None

    def _rebuild_topk1_chain_buffers(self) -> None:
        """Of core's own drafting, whose chains have as many rows as draft steps."""

    def draft(self, batch: ScheduleBatch, **kwargs: Any) -> None:
        raise RuntimeError("the MTP worker drafts inside speculative_step, not through draft().")

    def _draft_extend_for_prefill(
        self,
        batch: ScheduleBatch,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> EagleDraftInput:
        """As EAGLE's, and relayed as a step relays: [last emitted token, draft 1, ..., draft K].

        Prefill owns no slots behind the prompt, so only draft 1 is drafted, and repeated: the rest
        of the first chain is ``FirstChains``'s.
        """
        given = (batch, target_hidden_states, next_token_ids)
        if self.lists is not None:
            self.lists.begin_replies(next_token_ids)
        if self.skipped is not None:
            return self._without_drafts(self.skipped, *given)
        with _deterministic_drafts():
            draft_input = super()._draft_extend_for_prefill(*given, *args, **kwargs)
        first = draft_input.topk_index
        if self.hot_token_id is not None:
            first = self.hot_token_id[first]
        chain = torch.stack([draft_input.bonus_tokens, first[:, 0]], dim=1)
        draft_input.topk_index = lengthened(chain, get_spec().speculative_num_draft_tokens)
        if get_disagg().disaggregation_mode == "prefill":
            fill_transfer(draft_input)
            if device_profile().emulates:
                keep_indices_on_host(batch)
        return draft_input

    def _without_drafts(
        self,
        skipped: SkippedRows,
        batch: ScheduleBatch,
        hidden: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> EagleDraftInput:
        """The last emitted token alone, repeated: the MTP layer sees the prompt when it drafts."""
        # Slot i pairs the hidden state of token i with token i + 1.
        next_tokens = batch.input_ids.roll(-1)
        last_rows = torch.tensor(batch.extend_lens, device=next_tokens.device).cumsum(0) - 1
        next_tokens[last_rows] = _eagle_prefill_tail_tokens(batch, next_token_ids)
        skipped.keep(batch.out_cache_loc, hidden, next_tokens)
        bonus = next_token_ids.long()
        return EagleDraftInput(
            topk_p=torch.ones_like(bonus, dtype=torch.float32)[:, None],
            topk_index=lengthened(bonus[:, None], get_spec().speculative_num_draft_tokens),
            bonus_tokens=next_token_ids,
        )


def _deterministic_drafts() -> AbstractContextManager[Any]:
    """Core's own rejection sampling needs Triton and a draft of every token; ours needs neither."""
    return get_spec().override(speculative_use_rejection_sampling=False)
