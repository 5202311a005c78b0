"""Several ranks of one server: the cores of each on a CPU, and one draw for those of a batch."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import get_cpu_ids_by_node

from sglang_ascend.plugin.errors import StartupRefused

CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"


def share_machine(num_ranks: int) -> None:
    """Gives each rank its part of this process's cores, where the environment says nothing.

    SGLang puts one rank on each NUMA node and, left alone, refuses more ranks than nodes, or ranks
    that see different amounts of free memory: here they see the same memory at different times.
    """
    if num_ranks <= 1 or num_ranks <= len(get_cpu_ids_by_node()):
        return
    cores = sorted(os.sched_getaffinity(0))
    parts = [cores_of_rank(cores, rank, num_ranks) for rank in range(num_ranks)]
    os.environ.setdefault(CORES_OF_RANKS, "|".join(",".join(map(str, part)) for part in parts))
    os.environ.setdefault("OMP_NUM_THREADS", str(len(parts[0])))
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")


def cores_of_rank(cores: list[int], rank: int, num_ranks: int) -> list[int]:
    """Consecutive cores, as many for each rank; ranks share cores where there are too few."""
    each = len(cores) // num_ranks
    return cores[rank * each : (rank + 1) * each] or [cores[rank % len(cores)]]


def refuse_uneven_heads(server_args: Any) -> None:
    """Core asserts this in every rank, after it has started them. Raises StartupRefused."""
    num_heads = model_config_of(server_args).num_attention_heads
    if num_heads % server_args.tp_size:
        raise StartupRefused(
            f"--tp-size {server_args.tp_size} does not divide the model's {num_heads} attention "
            "heads: choose a size that does."
        )


def is_first_rank() -> bool:
    """Of a replica."""
    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def _group_of_a_batch() -> Any:
    """The ranks that run the same requests."""
    parallel = get_parallel()
    return parallel.tp_group if parallel.attn_dp_size == 1 else parallel.attn_tp_group


def draw_of_first_rank(tokens: torch.Tensor) -> torch.Tensor:
    """Overwrites the draws of every rank of a batch with those of its first.

    Ranks that disagree about one token run different batches, and wait for each other forever.
    """
    group = _group_of_a_batch()
    if group.world_size > 1:
        # Not by torch.distributed.broadcast: torch 2.13 asks for the capability of the device of a
        # CUDA tensor, which an NPU's is after transfer_to_npu, and torch_npu has none to give.
        group.device_group.broadcast(tokens, 0).wait()
    return tokens


def accepted_of_first_rank(
    tokens: torch.Tensor, accept_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``draw_of_first_rank``, of int64 [batch, K+1] and int32 [batch], in one broadcast."""
    if _group_of_a_batch().world_size == 1:
        return tokens, accept_lens
    accepted = draw_of_first_rank(torch.cat([tokens, accept_lens[:, None]], dim=1))
    return accepted[:, :-1].contiguous(), accepted[:, -1].int()


def decision_of_first_rank(*numbers: int) -> tuple[int, ...]:
    """What the first rank of a batch has decided, by a clock that no other rank has. Hosts wait for
    each other, and for no device."""
    group = _group_of_a_batch()
    if group.world_size == 1:
        return numbers
    decided = torch.tensor(numbers)
    group.cpu_group.broadcast(decided, 0).wait()
    return tuple(decided.tolist())
