"""The Triton kernels on a device against the float64 oracles of tests/ops, before any is timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sglang_ascend.ops import attention, sampling
from sglang_ascend.ops.sampling.threshold import Kept
from sglang_ascend.verify.checks import Check, sentence_of
from sglang_ascend.verify.operators.against_reference import check_operators
from sglang_ascend.verify.operators.synchronisation import check_synchronisation

# They are plain modules that the tests of this repository import; the wheel does not have them.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "ops"))
from joint_filters import filter_differences, rows_to_filter
from kept_tokens import differences, random_rows, tokens_kept
from paged_batch import Batch, agrees, uniform_batch

BODY = "triton"


@dataclass(frozen=True)
class Sizes:
    """How much is compared: all of it on a GPU, little of it in Triton's interpreter."""

    heads: Sequence[int] = (1, 16, 128)
    query_lens: Sequence[int] = (1, 2, 4)
    page_sizes: Sequence[int] = (1, 16, 128)
    kv_lens: Sequence[int] = (1, 17, 300, 1030)
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    mla_widths: tuple[int, int] = (512, 64)
    # Vocabulary and rows.
    filtered: Sequence[tuple[int, int]] = ((64, 20000), (1000, 4000), (32768, 200), (129280, 64))


def attend(batch: Batch, device: str, is_mla: bool) -> torch.Tensor:
    """The body's output, on the host."""
    op = attention.paged_mla if is_mla else attention.paged_gqa
    caches = (batch.key_cache,) if is_mla else (batch.key_cache, batch.value_cache)
    tensors = (batch.query, *caches, batch.table, torch.tensor(batch.kv_lens))
    sizes: dict[str, Any] = {"query_len": batch.query_lens[0], "page_size": batch.page_size}
    if is_mla:
        sizes["kv_lora_rank"] = batch.rank
    on_device = (tensor.to(device) for tensor in tensors)
    return op.implementation(BODY)(*on_device, scale=batch.scale, **sizes).cpu()


def attention_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """One for each dtype and kernel; NaN lies wherever no request's key does."""
    for dtype, is_mla in product(sizes.dtypes, (True, False)):
        name = f"{'paged_mla' if is_mla else 'paged_gqa'}, {dtype}"
        wrong = [
            f"{num_heads} heads, {query_len} rows, pages of {page_size}"
            for num_heads, query_len, page_size in product(
                sizes.heads, sizes.query_lens, sizes.page_sizes
            )
            if not is_right(batch_of(num_heads, query_len, page_size, dtype, is_mla, sizes), device)
        ]
        yield Check(name, not wrong, note="; ".join(wrong))


def batch_of(
    num_heads: int, query_len: int, page_size: int, dtype: torch.dtype, is_mla: bool, sizes: Sizes
) -> Batch:
    shape = (num_heads, *sizes.mla_widths) if is_mla else (num_heads, -(-num_heads // 16), 128)
    poison = float("nan")
    return uniform_batch(shape, query_len, page_size, dtype, is_mla, sizes.kv_lens, poison)


def is_right(batch: Batch, device: str, ahead: int = 0) -> bool:
    """``ahead`` breaks the oracle by that many keys."""
    is_mla = not hasattr(batch, "value_cache")
    return agrees(attend(batch, device, is_mla), batch.expected(ahead))


def control_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """What must not pass: a mask that is off by one, and a rule that keeps a token too many."""
    batch = batch_of(16, 4, sizes.page_sizes[-1], torch.float32, True, sizes)
    yield Check("control: a mask off by one is found", not is_right(batch, device, ahead=1))
    rows = random_rows(8, 100, seed=0)
    wrong, _ = differences(lambda *arguments: ~kept_on(device, *arguments), *rows)
    yield Check("control: the tokens left out are not those kept", wrong > 0)


def kept_on(device: str, logits: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> Any:
    """bool [rows, vocab_size], as an oracle's rule has it."""
    arguments = (tensor.to(device) for tensor in (logits, top_ks, top_ps))
    return tokens_kept(logits, on_host(sampling.top_k_top_p.implementation(BODY)(*arguments)))


def filtered_on(device: str, *arguments: torch.Tensor) -> torch.Tensor:
    on_device = (tensor.to(device) for tensor in arguments)
    return sampling.filter_probs.implementation(BODY)(*on_device).cpu()


def on_host(kept: Kept) -> Kept:
    return replace(kept, **{name: tensor.cpu() for name, tensor in vars(kept).items()})


def filter_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """Equal to a float64 sort but where the sum itself lies on the boundary."""
    for vocab_size, num_rows in sizes.filtered:
        size = num_rows, vocab_size
        kept, filtered = random_rows(*size, vocab_size), rows_to_filter(*size, vocab_size)
        found = {
            "top_k_top_p": differences(partial(kept_on, device), *kept),
            "filter_probs": filter_differences(partial(filtered_on, device), *filtered),
        }
        for name, (wrong, excused) in found.items():
            measured = {"rows": num_rows, "wrong": wrong, "at the boundary": excused}
            yield Check(f"{name}, {vocab_size} logits", wrong == 0, measured)


def check_kernels(device: str, sizes: Sizes) -> list[Check]:
    """Every check; a kernel that does not compile or run is a failed one."""
    checks: list[Check] = []
    for found in (control_checks, attention_checks, filter_checks):
        try:
            checks += found(device, sizes)
        except Exception as error:
            checks.append(Check(found.__name__, False, note=sentence_of(error)))
    return [*checks, *check_operators(device, quiet), *check_synchronisation(device, quiet)]


def quiet(what: str, total: int) -> None:
    """The status line of the caller is enough."""
