"""`deep_ep`: rows go to the ranks that hold their experts and come back as weighted sums.

The rows travel by collectives of the group's own, so each call is several launches, where a device
has one. Kernels stand in for the rest: which rows a rank takes, in which order, and the sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_emulation.goldens.quantized import dynamic_quant
from npu_emulation.stand_ins.expert_rows import (
    Config,
    EventOverlap,
    ExchangeError,
    Handle,
    lay_out,
    make_up,
    rows_of_rank,
)
from npu_emulation.stand_ins.kernels import launch, new_result

# bfloat16, or int8 and its scales.
Rows = Tensor | tuple[Tensor, Tensor]

STAND_INS = (
    (
        "`deep_ep`",
        "`srt/layers/moe/token_dispatcher/deepep.py`",
        "all-gathers, of which each rank keeps the rows of its experts; bfloat16 or int8",
    ),
)


class Buffer:
    """`normal` calls tell the host how many rows have come, which waits for the device; those of
    low latency do not, and have room for the most that may come."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        meta_addr: int = 0,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.low_latency_mode = low_latency_mode
        self._is_clean = True  # the device's: kernels change it when they run

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 0

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        launch("deep_ep:clean_low_latency_buffer", self._clean)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """(tokens for each rank, None, tokens for each expert, whether a token is for a rank)."""
        of_ranks, of_experts = (
            new_result(topk_idx, size, dtype=torch.int32) for size in (self.group_size, num_experts)
        )
        is_for = new_result(topk_idx, len(topk_idx), self.group_size, dtype=torch.bool)
        launch("deep_ep:get_dispatch_layout", lay_out, topk_idx, of_ranks, of_experts, is_for)
        return of_ranks, None, of_experts, is_for, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> tuple[Rows, None, None, list[int], Handle, EventOverlap]:
        """(rows by expert, None, None, how many each of this rank's experts has, the handle)."""
        if quant_mode not in (None, "bf16", "int8") or expert_alignment != 1 or num_worst_tokens:
            raise NotImplementedError("deep_ep's stand-in dispatches bfloat16 or int8, unaligned.")
        assert topk_idx is not None and num_tokens_per_expert is not None
        num_local = len(num_tokens_per_expert) // self.group_size
        counts = num_tokens_per_expert.new_full((1,), len(x))
        # As on a device, the host waits for what it is told.
        told = self._gather(torch.cat([counts, num_tokens_per_expert])).tolist()
        of_ranks = [
            [sum(of_one[1 + r * num_local + e] for of_one in told) for e in range(num_local)]
            for r in range(self.group_size)
        ]
        most_tokens = max(of_one[0] for of_one in told)
        most_rows = max(sum(of_rank) for of_rank in of_ranks)
        rows = self._gather(x, most_tokens)
        experts = self._gather(topk_idx, most_tokens)
        num_rows, is_int8 = sum(of_ranks[self.rank]), quant_mode == "int8"
        taken, _ = self._dispatch("normal", rows, experts, num_local, num_rows, is_int8)
        left = Handle(experts, topk_weights, len(x), most_rows, num_local, x.shape[1])
        return taken, None, None, of_ranks[self.rank], left, EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, None, EventOverlap]:
        """(sums of each token's rows by the weights that the dispatch was given, None)."""
        assert handle.topk_weights is not None
        return self._combine("normal", x, handle.topk_weights, handle), None, EventOverlap()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
    ) -> tuple[Rows, Tensor, Handle, EventOverlap, Any]:
        """(room for every row that may come, rows of each of this rank's experts, the handle).

        ``use_fp8`` asks an A2 and an A3 for int8.
        """
        if round_scale or use_ue8m0:
            raise NotImplementedError("deep_ep's stand-in dispatches bfloat16 or int8.")
        most_tokens, (num_tokens, hidden) = num_max_dispatch_tokens_per_rank, x.shape
        if num_tokens > most_tokens:
            raise ExchangeError(
                f"low_latency_dispatch of {num_tokens} tokens, where buffers hold {most_tokens}."
            )
        num_local = num_experts // self.group_size
        rows, experts = self._gather(x, most_tokens), self._gather(topk_idx, most_tokens)
        most_rows = self.group_size * most_tokens * min(topk_idx.shape[1], num_local)
        taken, counts = self._dispatch("low latency", rows, experts, num_local, most_rows, use_fp8)
        handle = Handle(experts, None, num_tokens, most_rows, num_local, hidden)
        return taken, counts, handle, EventOverlap(), lambda: None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Any]:
        return (
            self._combine("low latency", x, topk_weights, handle),
            EventOverlap(),
            lambda: None,
        )

    def _gather(self, rows: Tensor, size: int | None = None) -> Tensor:
        """Every rank's rows, [ranks, size, ...], made up by -1."""
        if size is not None:
            made_up = new_result(rows, size, *rows.shape[1:])
            launch("deep_ep:made_up", make_up, rows, made_up)
            rows = made_up
        gathered = new_result(rows, self.group_size, *rows.shape)
        dist.all_gather_into_tensor(gathered, rows, group=self.group)
        return gathered

    def _dispatch(
        self,
        mode: str,
        rows: Tensor,
        experts: Tensor,
        num_local_experts: int,
        num_rows: int,
        is_int8: bool,
    ) -> tuple[Rows, Tensor]:
        """(memory for ``num_rows`` rows, how many of them each expert has)."""
        dtype = torch.int8 if is_int8 else rows.dtype
        taken = new_result(rows, num_rows, rows.shape[-1], dtype=dtype)
        scales = new_result(rows, num_rows, dtype=torch.float32) if is_int8 else None
        counts = new_result(experts, num_local_experts)
        into = taken, scales, counts
        launch(f"deep_ep:{mode} dispatch", self._take, mode, rows, experts, *into)
        return (taken if scales is None else (taken, scales)), counts

    def _combine(self, mode: str, x: Tensor, topk_weights: Tensor, handle: Handle) -> Tensor:
        returned = self._gather(x, handle.most_rows)
        combined = new_result(x, handle.num_tokens, handle.hidden)
        launch(
            f"deep_ep:{mode} combine",
            self._add_up,
            mode,
            returned,
            handle.experts,
            handle.num_local_experts,
            topk_weights,
            combined,
        )
        return combined

    def _clean(self) -> None:
        self._is_clean = True

    def _enter(self, mode: str) -> None:
        """A kernel of low latency wants zeros, where one of the other mode has written."""
        if mode == "normal":
            self._is_clean = False
        elif not self._is_clean:
            raise ExchangeError(
                "a low-latency kernel runs on a buffer that a normal one has written: call "
                "clean_low_latency_buffer between them."
            )

    def _take(
        self,
        mode: str,
        rows: Tensor,
        experts: Tensor,
        taken: Tensor,
        scales: Tensor | None,
        counts: Tensor,
    ) -> None:
        self._enter(mode)
        choices, of_experts = rows_of_rank(experts, self.rank, len(counts))
        picked = rows.flatten(0, 1)[choices // experts.shape[-1]]
        if scales is not None:
            picked, scales[: len(choices)] = dynamic_quant(picked)
        taken[: len(choices)] = picked
        counts.copy_(of_experts)

    def _add_up(
        self,
        mode: str,
        returned: Tensor,
        experts: Tensor,
        num_local_experts: int,
        topk_weights: Tensor,
        combined: Tensor,
    ) -> None:
        self._enter(mode)
        values = torch.zeros(*experts.shape, combined.shape[1])  # [ranks, tokens, k, hidden]
        for rank, of_rank in enumerate(returned):
            choices, _ = rows_of_rank(experts, rank, num_local_experts)
            values.flatten(0, 2)[choices] = of_rank[: len(choices)].float()
        own = values[self.rank, : len(combined)]
        combined.copy_((own * topk_weights.float()[..., None]).sum(1))


MODULES = {"deep_ep": {"Buffer": Buffer, "Config": Config}}
