"""Requests of attention: random operands, their pages, and the results of loops in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch_npu

HEADS, KV_HEADS, WIDTH, BLOCK = 4, 2, 16, 128
SCALE = WIDTH**-0.5
KV_LENGTHS = [5, 130, 257]  # within a page, over one, over two


def oracle_row(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: int):
    """One query head [D] over the first `visible` keys [L, D]: (result, log-sum-exp) in float64."""
    scores = [float(query.double() @ keys[j].double()) * SCALE for j in range(visible)]
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    result = sum(weight * values[j].double() for j, weight in enumerate(weights))
    return result / sum(weights), peak + math.log(sum(weights))


@dataclass
class Requests:
    """Each request's queries [S, N, D] and keys and values [L, KV_N, D], of the host."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def random(cls, rows: list[int], kv_lengths: list[int], value_width: int = WIDTH) -> Requests:
        return cls(
            [torch.randn(num_rows, HEADS, WIDTH) for num_rows in rows],
            [torch.randn(length, KV_HEADS, WIDTH) for length in kv_lengths],
            [torch.randn(length, KV_HEADS, value_width) for length in kv_lengths],
        )

    def oracle(self, causal: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Row i of S sees keys up to L - S + i, or all: results [S, N, D], lse [S, N, 1]."""
        results, lses = [], []
        for query, keys, values in zip(self.queries, self.keys, self.values, strict=True):
            (rows, heads, _), length = query.shape, keys.shape[0]
            result = torch.empty(rows, heads, values.shape[-1], dtype=torch.float64)
            lse = torch.empty(rows, heads, 1, dtype=torch.float64)
            for i in range(rows):
                visible = length - rows + i + 1 if causal else length
                for head in range(heads):
                    kv = head * KV_HEADS // HEADS
                    result[i, head], lse[i, head] = oracle_row(
                        query[i, head], keys[:, kv], values[:, kv], visible
                    )
            results.append(result.float())
            lses.append(lse.float())
        return results, lses

    def paged(self, form: str) -> dict[str, torch.Tensor]:
        """Keys and values in shuffled pages, and the block table; unused places hold garbage."""
        counts = [-(-len(keys) // BLOCK) for keys in self.keys]
        blocks = torch.randperm(sum(counts) + 2)[: sum(counts)].split(counts)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        caches = []
        for tensors in (self.keys, self.values):
            cache = torch.full((sum(counts) + 2, BLOCK, *tensors[0].shape[1:]), 1e3)
            for request, rows in enumerate(tensors):
                table[request, : counts[request]] = blocks[request]
                for block, part in zip(blocks[request], rows.split(BLOCK), strict=True):
                    cache[block, : len(part)] = part
            if form == "BnBsH":
                cache = cache.flatten(2)
            elif form == "BnNBsD":
                cache = cache.transpose(1, 2).contiguous()
            caches.append(cache.to("npu"))
        return {"key": caches[0], "value": caches[1], "block_table": table.to("npu")}


def triangle() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")


def cumulative(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def attend(query: torch.Tensor, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    heads = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": SCALE}
    result, lse = torch_npu.npu_fused_infer_attention_score(
        query.to("npu"), arguments.pop("key"), arguments.pop("value"), **heads | arguments
    )
    return result.cpu(), lse.cpu()
