"""The "MTP" speculative algorithm: what the scheduler may assume, and the flags' defaults."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ascend.plugin.cpu.platform import DEFAULT_MAX_RUNNING_REQUESTS
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.hooks.registration import apply_hooks
from sglang_ascend.plugin.mtp.adaptive.refusals import asks_adaptive, most_looked_up
from sglang_ascend.plugin.mtp.chain_relay import ChainRelay
from sglang_ascend.plugin.mtp.disaggregation import keep_retracted_on_host, received_draft_input
from sglang_ascend.plugin.mtp.refusals import resolved_config, validate_server_args
from sglang_ascend.speculative.config import NAME


class MTPAlgorithm(CustomSpecAlgo):
    """Behaves as SGLang's EAGLE family: same draft KV, same radix keys.

    Where the worker is ours, a step hands tokens to the next and nothing else.
    """

    def is_eagle(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    # The three below are called by core but missing from CustomSpecAlgo in 0.5.23.
    def need_topk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return not device_profile().runs_step

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        future_map = ChainRelay if device_profile().runs_step else FutureMap
        return future_map(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def build_disagg_draft_input(self, batch: Any, last_tokens: Any, future_map: Any) -> Any:
        if device_profile().runs_step:
            return received_draft_input(batch, last_tokens, future_map)
        from sglang.srt.speculative.eagle_disaggregation import build_eagle_disagg_draft_input

        return build_eagle_disagg_draft_input(batch, last_tokens, future_map)

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int | None:
        """Half of the KV reserve of a decode step, which core doubles.

        K is that of the longest chain. A step writes 2K positions past the committed ones (K+1
        verified rows, K-1 draft decodes), and under overlap the host's committed length lags by up
        to K+1: 3K+1 in all.
        """
        num_draft_tokens = super().resolve_max_speculative_num_draft_tokens(server_args)
        if num_draft_tokens is None or not device_profile().runs_step:
            return num_draft_tokens
        return num_draft_tokens + (num_draft_tokens - 1) // 2

    def handle_server_args(self, server_args: Any) -> None:
        """Fills in what ``--speculative-algorithm MTP`` leaves open; never overrides a flag."""
        config = resolved_config(server_args)
        server_args.speculative_num_steps = config.num_steps
        server_args.speculative_eagle_topk = 1
        # Rows of the longest verification: those of a chain that was looked up, if they are more.
        server_args.speculative_num_draft_tokens = max(
            config.num_draft_tokens, most_looked_up() + 1
        )
        if server_args.speculative_draft_model_path is None:
            server_args.speculative_draft_model_path = server_args.model_path
            server_args.speculative_draft_model_revision = server_args.revision
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        server_args.speculative_adaptive = asks_adaptive(server_args)
        if device_profile().runs_step:
            keep_retracted_on_host(server_args)


def register_mtp() -> None:
    @SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=validate_server_args,
        spec_class=MTPAlgorithm,
    )
    def worker_class(server_args: Any) -> type:
        """On CUDA SGLang's EAGLE worker runs the chain with its device kernels."""
        # Nothing to do in a process that inherited its server's environment.
        apply_hooks()
        if device_profile().runs_step:
            from sglang_ascend.plugin.mtp.worker import MTPWorker

            return MTPWorker
        from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

        return EAGLEWorkerV2
