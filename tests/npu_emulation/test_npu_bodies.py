"""Every body for the NPU computes what its reference does, by calls that the documentation allows.

The operators of torch_npu are computed by goldens/, which were written from its documentation and
not from this package's references.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

from sglang_ascend import ops
from sglang_ascend.ops import mla
from sglang_ascend.ops.dispatch import OPS
from sglang_ascend.ops.npu import CallRefused, CheckedCalls

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
    lens = {"query_lens": [5, 9], "page_size": 128, "scale": 128**-0.5}
    return (noise(14, 4, 128), *caches, table, [150, 9]), lens


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


def test_every_body_has_a_call():
    assert sorted(CALLS) == BODIES


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("name", BODIES)
def test_a_body_computes_what_its_reference_computes(name):
    args, kwargs = CALLS[name]()
    on_npu = on_device(args)
    with CheckedCalls():
        found = OPS[name].implementation("npu")(*on_npu, **kwargs)
    expected = OPS[name].implementation("reference")(*args, **kwargs)
    # What was written in place counts as well; two roundings to bf16 may differ by one.
    assert_close(to("cpu", (found, on_npu)), (expected, args), rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("name", BODIES)
def test_another_call_does_not_pass_for_it(name):
    (args, kwargs), (others, _) = CALLS[name](), CALLS[name]()
    on_npu = on_device(others)
    found = OPS[name].implementation("npu")(*on_npu, **kwargs)
    expected = OPS[name].implementation("reference")(*args, **kwargs)
    with pytest.raises(AssertionError):
        assert_close(to("cpu", (found, on_npu)), (expected, args), rtol=2**-7, atol=2**-7)


def test_a_body_that_breaks_a_rule_is_stopped():
    with CheckedCalls(), pytest.raises(CallRefused, match="gamma has the width"):
        OPS["norm.rms_norm"].implementation("npu")(
            torch.zeros(2, 96, device="npu"), torch.zeros(64, device="npu"), 1e-6
        )
