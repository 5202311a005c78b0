"""Prefill and decode in two servers: what is sent beside the KV cache, and which flags serve.

SGLang's transfer has a row of 16 draft tokens for a request: ours is [bonus, draft 1, ...].
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.speculative.lengths import lengthened

# By what carries a KV cache: where it is, by SGLang's name. mooncake_tcp forces mooncake off RDMA.
CPU_TRANSFERS, NPU_TRANSFERS = ("mooncake", "mooncake_tcp"), ("ascend",)
# Where memfabric's engines find each other, in both servers.
STORE_URL = "ASCEND_MF_STORE_URL"

# The row that core allocates for an algorithm that carries no hidden state.
EMPTY_HIDDEN_STATE = 16


def fill_transfer(draft_input: EagleDraftInput) -> None:
    """On a prefill server: core sends ``topk_index`` in the width of ``topk_p``, and nothing of a
    request that has no hidden state."""
    chain = draft_input.topk_index
    draft_input.topk_p = torch.ones(chain.shape, device=chain.device)
    draft_input.hidden_states = torch.zeros(len(chain), EMPTY_HIDDEN_STATE, device=chain.device)


def received_draft_input(batch: Any, last_tokens: torch.Tensor, future_map: Any) -> EagleDraftInput:
    """On a decode server: the chains of a batch whose prompts another server prefilled.

    ``last_tokens`` int64 [batch] is each request's last emitted token. Only draft 1 is read, so the
    two servers may draft chains of different lengths. A request that comes back from a retraction
    has outlived that draft: its chain repeats the last token.
    """
    drafts = [int(r.output_topk_index[1] if len(r.output_ids) == 1 else -1) for r in batch.reqs]
    sent = torch.tensor(drafts, device=batch.device)
    chain = torch.stack([last_tokens, torch.where(sent < 0, last_tokens, sent)], dim=1)
    chain = lengthened(chain, get_spec().speculative_num_draft_tokens)
    draft_input = EagleDraftInput(
        topk_p=torch.ones(len(chain), 1, device=batch.device),
        topk_index=chain,
        bonus_tokens=last_tokens,
    )
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        future_map.publish(draft_input.future_indices, batch.seq_lens)
        future_map.stash(draft_input.future_indices, RelayPayload.from_draft_input(draft_input))
    return draft_input


def carry_draft_cache(allocator: Any, draft_pool: Any) -> None:
    """On a decode server: what a retracted request has in the MTP layer's cache goes to the host
    and back with what it has in the target's. Core copies the target's alone, and drafts behind a
    retraction would be of whatever lies in the request's new slots."""
    copy_target, load_target = allocator.get_cpu_copy, allocator.load_cpu_copy

    def copy_both(indices: torch.Tensor, **of_request: Any) -> tuple[Any, Any]:
        return copy_target(indices, **of_request), draft_pool.get_cpu_copy(indices)

    def load_both(copies: tuple[Any, Any], indices: torch.Tensor, **of_request: Any) -> None:
        of_target, of_draft = copies
        load_target(of_target, indices, **of_request)
        draft_pool.load_cpu_copy(of_draft, indices)

    allocator.get_cpu_copy, allocator.load_cpu_copy = copy_both, load_both


def keep_indices_on_host(batch: Any) -> None:
    """On a prefill server on CPU, before a forward: slots there need no asynchronous copy, which
    core makes into pinned memory and fences with a CUDA event."""
    for req in batch.reqs:
        if (sender := getattr(req, "disagg_kv_sender", None)) is not None:
            sender.supports_host_tensor_indices = False


def keep_retracted_on_host(server_args: Any) -> None:
    """On a decode server: a retracted request's caches are copied tensor by tensor, unless a flag
    says otherwise. SGLang chooses a pool of pinned pages for keys by head, which was not tried."""
    if server_args.disaggregation_mode == "decode":
        backup = server_args.disaggregation_decode_retraction_backup
        server_args.disaggregation_decode_retraction_backup = backup or "cpu_tensor"


def unserved_transfers(server_args: Any) -> dict[str, bool]:
    """Flags by whether they were given, for the table of refusals of our step."""
    backend = server_args.disaggregation_transfer_backend
    disaggregated = server_args.disaggregation_mode != "null"
    return {
        # The transfer brings no distribution that a draft was drawn from.
        "--speculative-use-rejection-sampling with --disaggregation-mode": (
            disaggregated and server_args.speculative_use_rejection_sampling
        ),
        f"--disaggregation-transfer-backend {backend}": (
            disaggregated and backend not in _served_transfers()
        ),
        # On a CPU its memory is registered with CUDA; on an NPU it was not tried.
        "--disaggregation-decode-retraction-backup host_pool": (
            disaggregated and server_args.disaggregation_decode_retraction_backup == "host_pool"
        ),
        # Its digests are computed by a CUDA kernel.
        "--disaggregation-enable-kv-checksum": server_args.disaggregation_enable_kv_checksum,
    }


def _served_transfers() -> tuple[str, ...]:
    return CPU_TRANSFERS if device_profile().emulates else NPU_TRANSFERS


def refuse_missing_engine(server_args: Any) -> None:
    """Raises StartupRefused where the engine that carries the cache cannot be loaded, or was not
    told where its peers are."""
    mode = server_args.disaggregation_mode
    if mode == "null":
        return
    if device_profile().emulates:
        return _require(
            "mooncake.engine",
            f"--disaggregation-mode {mode} needs Mooncake's transfer engine",
            "pip install mooncake-transfer-engine-non-cuda, and the system's libibverbs1.",
        )
    backend = "--disaggregation-transfer-backend ascend"
    _require("memfabric_hybrid", f"{backend} needs memfabric", "pip install memfabric-hybrid.")
    if not os.environ.get(STORE_URL):
        raise StartupRefused(
            f"{backend} needs {STORE_URL}, at which both servers find each other: set it to "
            "tcp://ADDRESS:PORT in both, with the prefill server's address and a port of its own."
        )


def _require(module: str, need: str, remedy: str) -> None:
    try:
        import_module(module)
    except (ImportError, OSError) as error:  # memfabric loads its libraries itself
        raise StartupRefused(f"{need} ({error}): {remedy}") from None
