"""For each body for the NPU a call with random operands on the CPU, and the way to the device."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from sglang_ascend import ops
from sglang_ascend.ops import mla
from sglang_ascend.ops.dispatch import OPS

for module in pkgutil.iter_modules(ops.__path__):
    if module.ispkg:
        importlib.import_module(f"{ops.__name__}.{module.name}")

BF16 = torch.bfloat16
Call = tuple[tuple[Any, ...], dict[str, Any]]


def noise(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.randn(rows, dim // 2).repeat(1, 2)
    return turned.cos().to(BF16), turned.sin().to(BF16)


def expert_rows() -> tuple[torch.Tensor, torch.Tensor]:
    return noise(5, 96), torch.randint(8, (5, 3), dtype=torch.int32)


def weight(*shape: int) -> torch.Tensor:
    """Scaled so that a product is about a quarter of its factor."""
    return noise(*shape) / (4 * shape[-2] ** 0.5)


def mla_prolog_call() -> Call:
    projections = mla.Projections(
        w_dq=weight(6144, 1536),
        q_norm=noise(1536),
        w_uq_qr=weight(1536, 2 * 192),
        w_uk=weight(2, 128, 512),
        w_dkv_kr=weight(6144, 576),
        kv_norm=noise(512),
    )
    slots = torch.randperm(48)[:5]
    caches = torch.zeros(3, 16, 1, 512, dtype=BF16), torch.zeros(3, 16, 1, 64, dtype=BF16)
    return (noise(5, 6144), projections, *angles(5, 64), slots, *caches), {"eps": 1e-6}


def prefill_call() -> Call:
    """A chunk behind a prefix over two pages, and a whole prompt."""
    caches = noise(4 * 128, 2, 128), noise(4 * 128, 2, 128)
    table = torch.tensor([[3, 1], [0, 0]])
    lens = {"query_lens": (5, 9), "page_size": 128, "scale": 128**-0.5}
    return (noise(14, 4, 128), *caches, table, (150, 9)), lens


CALLS: dict[str, Callable[[], Call]] = {
    "attention.paged_gqa_ragged": prefill_call,
    "norm.rms_norm": lambda: ((noise(5, 96), noise(96), 1e-6), {}),
    "norm.add_rms_norm": lambda: ((noise(5, 96), noise(5, 96), noise(96), 1e-6), {}),
    "rotary.rotate_halves": lambda: ((noise(5, 3, 64), *angles(5, 64)), {}),
    "rotary.rotate_pairs": lambda: ((noise(5, 3, 64), *angles(5, 64)), {}),
    "activation.swiglu": lambda: ((noise(5, 96),), {}),
    "kv_cache.write_kv": lambda: (
        (
            noise(5, 2, 64),
            noise(5, 2, 64),
            torch.zeros(3, 16, 2, 64, dtype=BF16),
            torch.zeros(3, 16, 2, 64, dtype=BF16),
            torch.randperm(48)[:5],
        ),
        {},
    ),
    "kv_cache.write_latent": lambda: (
        (
            noise(5, 576),
            noise(512),
            *angles(5, 64),
            torch.randperm(48)[:5],
            torch.zeros(3, 16, 1, 512, dtype=BF16),
            torch.zeros(3, 16, 1, 64, dtype=BF16),
            1e-6,
        ),
        {},
    ),
    "mla.prolog": mla_prolog_call,
    "mla.pack": lambda: ((noise(64, 96),), {}),
    "experts.choose": lambda: (
        (noise(5, 64, dtype=torch.float32), noise(64, dtype=torch.float32)),
        {"num_experts_per_token": 6, "num_groups": 8, "num_kept_groups": 4, "scale": 2.5},
    ),
    "experts.route": lambda: (expert_rows(), {"num_experts": 8}),
    "experts.grouped_matmul": lambda: (
        (noise(9, 96), noise(4, 96, 32), torch.tensor([2, 0, 4, 3])),
        {},
    ),
    "experts.combine": lambda: (
        (noise(15, 96), noise(5, 3), torch.randperm(15).int()),
        {},
    ),
}
BODIES = sorted(name for name, op in OPS.items() if "npu" in op._implementations)


def to(device: str, value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), value)


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    moved = to("npu", args)
    return tuple(mla.packed(arg) if isinstance(arg, mla.Projections) else arg for arg in moved)
