"""SGLang's own EAGLE worker (topk 1), runnable on a CPU: what the fused step is measured against.

Its order, its preparation and its metadata builds stay SGLang's; only bodies that exist as Triton
or CUDA kernels alone get a PyTorch one, and the attention backend plans as it did before it was
handed a plan. Registered as the speculative algorithm EAGLE_IN_TREE.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ascend.attention.metadata import StepMetadata, slot_table
from sglang_ascend.plugin.attention.backend import AscendAttentionBackend
from sglang_ascend.plugin.mtp.algorithm import MTPAlgorithm
from sglang_ascend.plugin.mtp.draft_worker import MTPDraftWorker
from sglang_ascend.plugin.mtp.refusals import validate_server_args
from sglang_ascend.plugin.mtp.worker import MTPWorker

NAME = "EAGLE_IN_TREE"
_SPECULATIVE = "sglang.kernels.ops.speculative"


class PlanningBackend(AscendAttentionBackend):
    """Builds its metadata for every forward; ``step_offset`` j is draft step j's view."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any, step_offset: int = 0) -> None:
        super().__init__(model_runner)
        self.step_offset = step_offset

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode, spec_info = forward_batch.forward_mode, forward_batch.spec_info
        added = self.step_offset
        if mode.is_decode():
            query_len = 1
        elif mode.is_target_verify():
            query_len = added = spec_info.draft_token_num
        elif mode.is_draft_extend_v2():
            query_len = spec_info.num_tokens_per_req
        else:
            super().init_forward_metadata(forward_batch)
            return
        kv_lens = forward_batch.seq_lens.long() + added
        self.step_metadata = StepMetadata(
            block_table=slot_table(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                kv_lens,
                int(forward_batch.seq_lens_cpu.max()) + added,
            ),
            kv_lens=kv_lens,
            page_size=1,
            query_len=query_len,
        )


class DraftViews:
    """One backend per draft step, all planned from one batch."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any, num_steps: int) -> None:
        self.attn_backends = [PlanningBackend(model_runner, j + 1) for j in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


class InTreeDraftWorker(MTPDraftWorker):
    """SGLang's draft worker, less its factories of backends and its token map."""

    draft = EagleDraftWorker.draft
    _draft_extend_for_prefill = EagleDraftWorker._draft_extend_for_prefill
    _rebuild_topk1_chain_buffers = EagleDraftWorker._rebuild_topk1_chain_buffers

    def init_attention_backend(self) -> None:
        super().init_attention_backend()
        self.draft_attn_backend = DraftViews(self.draft_runner, self.speculative_num_steps)
        self.draft_runner.draft_attn_backend = self.draft_attn_backend


class InTreeWorker(EAGLEWorkerV2):
    """SGLang's step: draft, verify, publish, extend."""

    draft_worker_cls = InTreeDraftWorker
    __init__ = MTPWorker._init_as_eagle


class InTreeAlgorithm(MTPAlgorithm):
    def carries_draft_hidden_states(self) -> bool:
        return True

    def create_future_map(self, device: Any, req_to_token_pool: Any, **needs: bool) -> FutureMap:
        return FutureMap(device, self, req_to_token_pool, **needs)

    resolve_max_speculative_num_draft_tokens = (
        CustomSpecAlgo.resolve_max_speculative_num_draft_tokens
    )


def chain_positions(seq_lens: torch.Tensor, width: int) -> torch.Tensor:
    return (seq_lens[:, None] + torch.arange(width)).reshape(-1)


def window(req_pool_indices, req_to_token, seq_lens, width) -> torch.Tensor:
    positions = chain_positions(seq_lens, width).view(-1, width)
    return req_to_token[req_pool_indices[:, None], positions].reshape(-1).long()


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, **outputs
) -> None:
    out_cache_loc.copy_(window(req_pool_indices, req_to_token, seq_lens, topk * num_cols))


def assign_extend_cache_locs_uniform_func(
    req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, **outputs
) -> torch.Tensor:
    return window(req_pool_indices, req_to_token, start_offset, draft_token_num)


def build_tree_kernel_efficient_func(
    parent_list,
    top_scores_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode,
) -> None:
    """A chain: each row's only child is the next row."""
    positions.copy_(chain_positions(seq_lens, num_verify_tokens))
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token[:, :-1] = torch.arange(1, num_verify_tokens)


def verify_tree_greedy_func(
    predicts, accept_index, accept_token_num, candidates, target_predict, **tree
) -> tuple:
    matches = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(dim=1)
    accept_token_num.copy_(matches.sum(dim=1))
    predicts.copy_(target_predict.reshape(-1))
    rows = torch.arange(predicts.numel(), dtype=torch.int32).view(candidates.shape)
    kept = torch.arange(candidates.shape[1]) <= accept_token_num[:, None]
    accept_index.copy_(torch.where(kept, rows, -1))
    return predicts, accept_index, accept_token_num


def fill_bonus_tokens_func(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size):
    last = torch.arange(batch_size) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def gather_spec_extras(indices, topk_p, topk_index, output_tokens, hidden_states) -> tuple:
    buffers = (topk_p, topk_index, output_tokens, hidden_states)
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


STAND_INS = {
    f"{_SPECULATIVE}.cache_locs": (
        assign_draft_cache_locs_contiguous_func,
        assign_extend_cache_locs_uniform_func,
    ),
    f"{_SPECULATIVE}.spec_tree": (build_tree_kernel_efficient_func, verify_tree_greedy_func),
    f"{_SPECULATIVE}.eagle": (fill_bonus_tokens_func,),
    f"{_SPECULATIVE}.gather_spec_extras": (gather_spec_extras,),
}


def install() -> None:
    """Registers the algorithm and puts the stand-ins in; call it after SGLang's plugins loaded."""
    for module_name, functions in STAND_INS.items():
        module = importlib.import_module(module_name)
        for function in functions:
            original = getattr(module, function.__name__)
            for loaded in list(sys.modules.values()):
                if getattr(loaded, function.__name__, None) is original:
                    setattr(loaded, function.__name__, function)
    register_attention_backend("ascend")(PlanningBackend)
    SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=validate_server_args,
        spec_class=InTreeAlgorithm,
    )(lambda server_args: InTreeWorker)
