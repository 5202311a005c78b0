"""The operator part of verify-npu passes right bodies and finds wrong ones, on whatever device.

Here the device is the CPU, whose bodies (Numba) stand for those of the NPU; the emulated NPU has
the same part in tests/npu_emulation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sglang_ascend.ops.dispatch import OPS, REFERENCE, Implementation, load_operators
from sglang_ascend.verify.operators import over_tiles, speed, synchronisation
from sglang_ascend.verify.operators.against_reference import (
    BoundCall,
    calls_over_tiles,
    check_call,
    check_operators,
    distance,
)
from sglang_ascend.verify.operators.calls import CALLS
from sglang_ascend.verify.operators.operator_call import arguments_of

load_operators()
FP32 = torch.float32
QUANTIZED_ON_CPU = {
    "quantized.grouped_integer_linear",
    "quantized.grouped_weight_only_linear",
    "quantized.integer_linear",
    "quantized.prepare_integer",
    "quantized.weight_only_linear",
}
ON_CPU = (
    "attention.paged_gqa",
    "attention.paged_gqa_ragged",
    "attention.paged_mla",
    "attention.paged_mla_ragged",
    "chain.prepare_step",
    "chain.verify_chain",
    "experts.gating",
    "experts.permute",
    "experts.unpermute",
    "layers.swiglu",
    "sampling.filter_probs",
    "sampling.top_k_top_p",
)


def quiet(what: str, total: int) -> None:
    pass


def call_of(name: str) -> BoundCall:
    return BoundCall(OPS[name], CALLS[name].dtypes[-1], "cpu")


@pytest.fixture
def another_body(monkeypatch) -> Callable[[str, Callable[..., Any]], BoundCall]:
    """Puts a function in the place of an operator's body on the CPU."""

    def install(name: str, function: Callable[..., Any]) -> BoundCall:
        body = Implementation("another", function, frozenset({"cpu"}))
        monkeypatch.setitem(OPS[name]._bodies, "cpu", (body, *OPS[name].bodies("cpu")))
        return call_of(name)

    return install


def test_every_operator_with_a_body_for_the_npu_has_a_call():
    for_npu = {
        name
        for name, op in OPS.items()
        if any(
            "npu" in body.devices or (not body.devices and body.name != REFERENCE)
            for body in op._implementations.values()
        )
    }
    assert set(CALLS) == for_npu


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_same_each_time_and_leaves_the_generator_alone(name):
    state = torch.random.get_rng_state()
    dtype = CALLS[name].dtypes[0]
    first, second = (arguments_of(CALLS[name], dtype)[0] for _ in range(2))
    tensors = [
        pair for pair in zip(first, second, strict=True) if isinstance(pair[0], torch.Tensor)
    ]
    assert all(torch.equal(a, b) for a, b in tensors)
    assert torch.equal(torch.random.get_rng_state(), state)
    other, _ = arguments_of(CALLS[name], dtype, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a is not b)


def test_the_bodies_of_this_machine_pass():
    checks = check_operators("cpu", quiet)
    assert [check.name for check in checks if check.passed is False] == []
    passed = {check.name for check in checks if check.passed}
    assert "quantized.integer_linear with a static input (bfloat16)" in passed
    judged = {name.split(" ")[0] for name in passed}
    assert judged == {*ON_CPU, "chain.place_draft_decode", *QUANTIZED_ON_CPU}
    assert all(check.note for check in checks if check.passed is None)


def rounded_too_early(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return OPS["attention.paged_gqa"].implementation("reference")(
        query.bfloat16().float(), *args, **kwargs
    )


def sees_one_key_less(query: Any, keys: Any, values: Any, table: Any, lens: Any, **kwargs: Any):
    attend = OPS["attention.paged_gqa"].implementation("reference")
    return attend(query, keys, values, table, lens - 1, **kwargs)


def keeps_one_token_more(logits: torch.Tensor, *args: Any):
    kept = OPS["sampling.top_k_top_p"].implementation("reference")(logits, *args)
    below = logits.float().masked_fill(logits >= kept.threshold[:, None], -torch.inf).amax(1)
    return replace(
        kept, threshold=torch.where(torch.arange(len(below)) == 5, below, kept.threshold)
    )


def moves_its_input(seq_lens: torch.Tensor, *args: Any):
    inputs = OPS["chain.prepare_step"].implementation("reference")(seq_lens, *args)
    seq_lens += 1
    return inputs


def accepts_one_more(*args: Any) -> torch.Tensor:
    return OPS["chain.verify_chain"].implementation("reference")(*args) + 1


def counts_in_another_type(*args: Any) -> torch.Tensor:
    return OPS["chain.verify_chain"].implementation("reference")(*args).long()


def fails(*args: Any) -> torch.Tensor:
    raise RuntimeError("no kernel\nfor this SoC")


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("attention.paged_gqa", rounded_too_early),
        ("attention.paged_gqa", sees_one_key_less),
        ("sampling.top_k_top_p", keeps_one_token_more),
        ("chain.prepare_step", moves_its_input),
        ("chain.verify_chain", accepts_one_more),
        ("chain.verify_chain", counts_in_another_type),
        ("chain.verify_chain", fails),
    ],
)
def test_a_wrong_body_is_found(another_body, name, mistake):
    assert check_call(another_body(name, mistake)).passed is False


def in_tiles(query, latent, table, lens, *, query_rope, rope_cache, overwrites, **sizes):
    """Latent attention in tiles of 128 keys, whose query may be gone after the first of them."""
    page_size, query_len = sizes["page_size"], sizes["query_len"]
    keys, output = torch.cat([latent, rope_cache], -1)[:, 0].float(), []
    whole = torch.cat([query, query_rope], -1).float()
    for left, pages, kv_len in zip(whole.split(query_len), table, lens.tolist(), strict=True):
        row = torch.arange(query_len)[:, None, None]
        total, weighted = torch.zeros(2, *left.shape[:2], 1)
        for first in range(0, kv_len, 128):
            seen = torch.arange(first, min(first + 128, kv_len))
            key = keys[pages[seen // page_size] * page_size + seen % page_size]
            weights = torch.exp(sizes["scale"] * left @ key.T) * (seen <= kv_len - query_len + row)
            total = total + weights.sum(-1, keepdim=True)
            weighted = weighted + weights @ key[:, : latent.shape[-1]]
            if overwrites:  # by the left operand of the second product
                left = torch.nn.functional.pad(weights, (0, left.shape[-1] - len(seen)))
        output.append(weighted / total)
    return torch.cat(output).to(query.dtype)


def test_an_overwritten_left_operand_is_found_first(monkeypatch):
    """The same body without the mistake passes, and with it on requests of one tile."""
    found = [check.name for check in check_operators("cpu", quiet)[:4]]
    assert found == [call.name for call in calls_over_tiles("cpu")]
    op = OPS["attention.paged_mla"]

    def passed(overwrites: bool) -> set[bool | None]:
        body = partial(in_tiles, overwrites=overwrites)
        another = Implementation("in tiles", body, frozenset({"cpu"}))
        monkeypatch.setitem(op._bodies, "cpu", (another, op.bodies("cpu")[-1]))
        return {check_call(call).passed for call in calls_over_tiles("cpu") if call.op is op}

    assert passed(overwrites=False) == {True} and passed(overwrites=True) == {False}
    monkeypatch.setattr(over_tiles, "KV_LENS", torch.full((24,), 128))
    assert passed(overwrites=True) == {True}


def test_what_a_body_raises_is_reported_in_one_line(another_body):
    check = check_call(another_body("chain.verify_chain", fails))
    assert check.note == "RuntimeError: no kernel for this SoC"


class Lost(torch.Tensor):
    """What a kernel leaves that failed: the device says so when it is fetched."""

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("aicore exception, error code 507015")


def test_a_kernel_that_failed_is_reported_when_its_result_is_fetched(another_body):
    def fails_late(sampled: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(sampled), dtype=torch.int32).as_subclass(Lost)

    check = check_call(another_body("chain.verify_chain", fails_late))
    assert (check.passed, check.note) == (
        False,
        "RuntimeError: aicore exception, error code 507015",
    )


def test_a_device_that_takes_no_call_any_more_ends_no_part(monkeypatch):
    """As behind a kernel that failed: tensors cannot be brought there either."""

    def prepare(self: BoundCall, device: str) -> None:
        raise RuntimeError("the device is in error")

    monkeypatch.setattr(BoundCall, "prepare", prepare)
    monkeypatch.setattr(synchronisation, "wait_of", prepare)
    # Chosen by the call's arguments where there is more than the reference.
    for checks in (
        check_operators("cpu", quiet),
        synchronisation.check_synchronisation("cpu", quiet),
        speed.time_operators("cpu", 1, quiet),
    ):
        failed = [check for check in checks if check.passed is False]
        assert len(failed) > len(ON_CPU)
        assert {check.note for check in failed} == {"RuntimeError: the device is in error"}


@pytest.mark.parametrize(
    ("found", "expected", "share"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0 + 2e-5, 2.0], [1.0, 2.0], 1.0),
        ([float("inf")], [float("inf")], 0.0),
        ([float("nan")], [1.0], float("inf")),
        ([0.0, 1.0], [float("-inf"), 1.0], float("inf")),
        ([float("inf")], [float("-inf")], float("inf")),
        ([1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_the_share_of_the_tolerance_is_absolute_and_relative(found, expected, share):
    """float32: 1e-5 of one and of the expected value."""
    measured = distance(torch.tensor(found), torch.tensor(expected), 1)[1]
    assert measured == pytest.approx(share, abs=0.01)
    doubled = distance(torch.tensor(found), torch.tensor(expected), 2)[1]
    assert doubled == pytest.approx(share / 2, abs=0.01)


def test_integers_are_equal_or_wrong():
    """Of a tolerance relative to them, large ones could be off by one."""
    large = torch.tensor([10**6])
    assert distance(large, large, 1) == (0.0, 0.0)
    assert distance(large + 1, large, 1)[1] == float("inf")


def test_a_body_that_reads_its_tensors_is_seen(another_body):
    def reads(sampled: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        drafted.sum().item()
        return drafted

    assert synchronisation.sees_a_wait("cpu").passed
    found = synchronisation.check_call(another_body("chain.verify_chain", reads))
    assert "_local_scalar_dense" in found.note
    still = synchronisation.check_call(another_body("chain.verify_chain", lambda a, b: 2 * b))
    assert "_local_scalar_dense" not in still.note
    assert found.passed is still.passed is None


def test_a_timing_is_a_ratio_of_alternating_rounds_and_judges_nothing(monkeypatch):
    clock = {"body": iter([9.0, 9.0, 2.0, 4.0, 3.0]), "reference": iter([9.0, 9.0, 4.0, 16.0, 3.0])}
    call = call_of("chain.verify_chain")
    runs = []

    def microseconds(run: Callable[[], Any], device: str) -> float:
        name = "body" if "call.body" in run_source(run) else "reference"
        runs.append(name)
        return next(clock[name])

    def run_source(run: Callable[[], Any]) -> str:
        return "call.body" if "call" in run.__code__.co_freevars else "reference"

    monkeypatch.setattr(speed, "microseconds", microseconds)
    check = speed.time_call(call, rounds=3)
    assert check.passed is None
    assert check.measured["reference / body"] == 2.0
    assert (check.measured["least"], check.measured["most"]) == (1.0, 4.0)
    assert runs[:4] in (
        ["body", "reference", "reference", "body"],
        ["reference", "body", "body", "reference"],
    )
