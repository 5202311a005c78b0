"""python -m npu_emulation.expert_programs RANK FOLDER: what two ranks run through the stand-in of
`deep_ep` (rank_programs.py, test_expert_exchange.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from npu_emulation import stand_ins
from npu_emulation.counters import counted
from npu_emulation.device_work import raise_failures
from npu_emulation.goldens.quantized import dynamic_quant
from npu_emulation.rank_programs import RANKS, main
from npu_emulation.stand_ins import expert_exchange
from npu_emulation.stand_ins.expert_exchange import Buffer
from npu_emulation.stand_ins.expert_rows import ExchangeError

EXPERTS, HIDDEN, TOP_K, MOST_TOKENS = 8, 16, 2, 6
OF_A_RANK = EXPERTS // RANKS
NUM_TOKENS = (5, 3)  # of each rank
# Rank 1 sends most of its rows to rank 0, nobody chose expert 7, and -1 is no expert.
CHOICES = (
    [[0, 5], [3, 2], [5, 1], [4, 5], [2, 6]],
    [[1, 0], [2, -1], [6, 0]],
)
WAITS = ("stream_syncs", "event_syncs")


def tokens(rank: int, added: int = 0) -> torch.Tensor:
    """Small integers: sums and products by weights of 1/2 and 1/4 are exact in bfloat16."""
    values = torch.arange(NUM_TOKENS[rank] * HIDDEN).view(-1, HIDDEN)
    return ((values * (3 + 2 * rank) + added) % 4).bfloat16()


def tokens_of_many_sizes(rank: int) -> torch.Tensor:
    """Rows whose scales of int8 differ."""
    return tokens(rank) * 2 ** torch.arange(NUM_TOKENS[rank])[:, None]


def choices(rank: int) -> torch.Tensor:
    return torch.tensor(CHOICES[rank])


def weights(rank: int) -> torch.Tensor:
    return torch.tensor([[0.5, 0.25]]).repeat(NUM_TOKENS[rank], 1)


def matrices() -> torch.Tensor:
    """[experts, hidden, hidden]: each scales by a number of its own and rolls."""
    identity = torch.eye(HIDDEN)
    each = [identity.roll(expert, 1) * (expert + 1) for expert in range(EXPERTS)]
    return torch.stack(each).bfloat16()


@cache
def on_rank(rank: int) -> torch.Tensor:
    return matrices()[rank * OF_A_RANK : (rank + 1) * OF_A_RANK].to("npu")


def by_experts(rank: int, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As SGLang's runner multiplies what came to this rank."""
    return _grouped_product(rows, on_rank(rank), counts)


def by_int8_experts(
    rank: int, rows: torch.Tensor, scales: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The same of rows of int8, with matrices of int8 whose scales are 1."""
    ones = torch.ones(OF_A_RANK, HIDDEN, dtype=torch.bfloat16, device="npu")
    held = on_rank(rank).to(torch.int8)
    return _grouped_product(rows, held, counts, scale=[ones], per_token_scale=[scales])


def _grouped_product(
    rows: torch.Tensor, held: torch.Tensor, counts: torch.Tensor, **scales: list[torch.Tensor]
) -> torch.Tensor:
    (product,) = torch.ops.npu.npu_grouped_matmul(
        x=[rows],
        weight=[held],
        split_item=2,
        group_type=0,
        group_list_type=1,
        group_list=counts,
        output_dtype=torch.bfloat16,
        **scales,
    )
    return product


def new_buffer() -> Buffer:
    return Buffer(dist.group.WORLD, low_latency_mode=True)


def on_device(rank: int, added: int = 0) -> tuple[torch.Tensor, ...]:
    x, experts, by = tokens(rank, added), choices(rank), weights(rank)
    return x.to("npu"), experts.to("npu"), by.to("npu")


def dispatch_normal(
    buffer: Buffer, given: tuple[torch.Tensor, ...], quant_mode: str = "bf16"
) -> tuple[Any, ...]:
    x, experts, by = given
    of_ranks, _, of_experts, is_for, _ = buffer.get_dispatch_layout(experts, EXPERTS)
    rows, _, _, counts, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=of_ranks,
        is_token_in_rank=is_for,
        num_tokens_per_expert=of_experts,
        topk_idx=experts,
        topk_weights=by,
        quant_mode=quant_mode,
    )
    return rows, counts, handle


def exchange_normal(buffer: Buffer, rank: int) -> tuple[torch.Tensor, list[int]]:
    rows, counts, handle = dispatch_normal(buffer, on_device(rank))
    product = by_experts(rank, rows, torch.tensor(counts, device="npu"))
    return buffer.combine(product, handle)[0], counts


def exchange_low_latency(
    buffer: Buffer, rank: int, given: tuple[torch.Tensor, ...], most_tokens: int = MOST_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    x, experts, by = given
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(
        x, experts, most_tokens, EXPERTS, use_fp8=False
    )
    product = by_experts(rank, rows, counts)
    return buffer.low_latency_combine(product, experts, by, handle)[0], counts


def layout(rank: int) -> Any:
    of_ranks, _, of_experts, is_for, _ = new_buffer().get_dispatch_layout(
        choices(rank).to("npu"), EXPERTS
    )
    return [of_ranks.tolist(), of_experts.tolist(), is_for.tolist()]


def normal(rank: int) -> Any:
    result, counts = exchange_normal(new_buffer(), rank)
    return [result.tolist(), counts]


def low_latency(rank: int) -> Any:
    result, counts = exchange_low_latency(new_buffer(), rank, on_device(rank))
    return [result.tolist(), counts.tolist()]


def quantized(rank: int) -> Any:
    """Rows and scales that come to the rank, in either mode."""
    given = on_device(rank)
    of_normal, counts, _ = dispatch_normal(new_buffer(), given, quant_mode="int8")
    of_low_latency, *_ = new_buffer().low_latency_dispatch(*given[:2], MOST_TOKENS, EXPERTS)
    return [
        [part[: sum(counts)].tolist() for part in found] for found in (of_normal, of_low_latency)
    ]


def scales_of_other_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mistake: each row travels with the scale of the one before it."""
    codes, scales = dynamic_quant(x)
    return codes, scales.roll(1)


def exchange_int8(rank: int) -> list[Any]:
    """Normal mode, then low latency: what experts make of int8 and its scales."""
    given = tokens_of_many_sizes(rank).to("npu"), *on_device(rank)[1:]
    normal, low_latency = new_buffer(), new_buffer()
    (rows, scales), counts, handle = dispatch_normal(normal, given, quant_mode="int8")
    product = by_int8_experts(rank, rows, scales, torch.tensor(counts, device="npu"))
    of_normal, *_ = normal.combine(product, handle)
    (rows, scales), counts, handle, *_ = low_latency.low_latency_dispatch(
        *given[:2], MOST_TOKENS, EXPERTS
    )
    product = by_int8_experts(rank, rows, scales, counts)
    of_low_latency, *_ = low_latency.low_latency_combine(product, *given[1:], handle)
    return [of_normal.tolist(), of_low_latency.tolist()]


def int8(rank: int) -> Any:
    return exchange_int8(rank)


def int8_with_scales_of_other_rows(rank: int) -> Any:
    expert_exchange.dynamic_quant = scales_of_other_rows
    found = exchange_int8(rank)
    expert_exchange.dynamic_quant = dynamic_quant
    return found


def waits(rank: int) -> Any:
    """Of the host: in either mode, before it reads the result."""
    buffer, given = new_buffer(), on_device(rank)
    with counted() as of_low_latency:
        exchange_low_latency(buffer, rank, given)
    torch.npu.synchronize()
    with counted() as of_normal:
        dispatch_normal(buffer, given)
    return [sum(found.calls.get(w, 0) for w in WAITS) for found in (of_low_latency, of_normal)]


def replayed(rank: int) -> Any:
    buffer, given, graph = new_buffer(), on_device(rank), torch.npu.NPUGraph()
    exchange_low_latency(buffer, rank, given)
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        result, _ = exchange_low_latency(buffer, rank, given)
    found = []
    for added in (0, 1):
        given[0].copy_(tokens(rank, added))
        with counted() as replay:
            graph.replay()
        found += [replay.calls, result.tolist()]
    return found


def after_normal(rank: int) -> Any:
    """Low latency behind the other mode: with the buffer cleaned, and without."""
    buffer = new_buffer()
    exchange_normal(buffer, rank)
    buffer.clean_low_latency_buffer(MOST_TOKENS, HIDDEN, EXPERTS)
    cleaned = exchange_low_latency(buffer, rank, on_device(rank))[0].tolist()
    exchange_normal(buffer, rank)
    exchange_low_latency(buffer, rank, on_device(rank))
    return [cleaned, error_of_device()]


def error_of_device() -> str:
    try:
        torch.npu.synchronize()
        raise_failures()
    except ExchangeError as error:
        return str(error)
    return "no error"


def too_many_tokens(rank: int) -> Any:
    try:
        exchange_low_latency(new_buffer(), rank, on_device(rank), NUM_TOKENS[rank] - 1)
    except ExchangeError as error:
        return str(error)
    return "no error"


def unsorted(rank: int) -> Any:
    """A mistake: rows come in the order of tokens."""
    sorted_by_expert = expert_exchange.rows_of_rank

    def in_order(experts: torch.Tensor, rank: int, num_local: int) -> tuple[torch.Tensor, ...]:
        taken, counts = sorted_by_expert(experts, rank, num_local)
        return taken.sort().values, counts

    expert_exchange.rows_of_rank = in_order
    result, _ = exchange_low_latency(new_buffer(), rank, on_device(rank))
    found = result.tolist()
    expert_exchange.rows_of_rank = sorted_by_expert
    return found


if __name__ == "__main__":
    stand_ins.install()
    main(
        layout,
        normal,
        low_latency,
        quantized,
        int8,
        int8_with_scales_of_other_rows,
        waits,
        replayed,
        too_many_tokens,
        unsorted,
        after_normal,
    )
