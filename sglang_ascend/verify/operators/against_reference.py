"""Each operator's body on the device against its reference on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from sglang_ascend.ops.dispatch import OPS, REFERENCE, Implementation, Op, load_operators
from sglang_ascend.ops.npu import CheckedCalls
from sglang_ascend.verify.checks import Check, Progress, found_by
from sglang_ascend.verify.operators.calls import CALLS
from sglang_ascend.verify.operators.operator_call import OperatorCall, arguments_of
from sglang_ascend.verify.operators.over_tiles import OVER_TILES
from sglang_ascend.verify.operators.quantized_calls import INT4, STATIC_INPUT, Loaded

# Relative and absolute, by the type of the result; integers are equal or wrong.
# Two roundings to bf16 may differ by one place, 2^-7; float32 sums of 1024 products err by 1e-6.
TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
# Of an operator's calls: the usual one, and others.
FORMS = {"": CALLS, "with a static input": STATIC_INPUT, "of int4": INT4, "over tiles": OVER_TILES}


@dataclass(frozen=True)
class BoundCall:
    """An operator's body with arguments; ``prepare`` makes fresh ones on the device."""

    op: Op
    dtype: torch.dtype
    device: str
    form: str = ""  # of FORMS

    @property
    def name(self) -> str:
        shown = str(self.dtype).removeprefix("torch.")
        return f"{self.op.name}{self.form and ' '}{self.form} ({shown})"

    @property
    def case(self) -> OperatorCall:
        return FORMS[self.form][self.op.name]

    @property
    def body(self) -> Callable[..., Any]:
        return self.chosen.function

    @cached_property
    def chosen(self) -> Implementation:
        """The first body for the device that accepts the call."""
        args, kwargs = self.prepare(self.device)
        return self.op.body_of(*args, **kwargs)

    def prepare(self, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments_of(self.case, self.dtype)
        return to(device, args), to(device, kwargs)

    def declined(self) -> str:
        """Why the reference serves this call here; empty where a body does."""
        first = self.op.choose(self.device)
        if first.name == REFERENCE:
            return f"no body for {self.device} here: the reference serves"
        return f"{first.name} leaves it to the reference" if self.chosen.name == REFERENCE else ""


def _calls_of(form: str, device: str) -> Iterator[BoundCall]:
    load_operators()
    if device == "npu":  # else a weight is not stored as a server's is; SGLang sets it too
        torch.get_device_module(device).config.allow_internal_format = True
    for name, call in sorted(FORMS[form].items()):
        for dtype in call.dtypes:
            yield BoundCall(OPS[name], dtype, device, form)


def bound_calls(device: str) -> list[BoundCall]:
    forms = ("", "with a static input", "of int4")
    return [call for form in forms for call in _calls_of(form, device)]


def calls_over_tiles(device: str) -> list[BoundCall]:
    return [*_calls_of("over tiles", device)]


def to(device: str, value: Any) -> Any:
    """Always copies: an operator may write into its arguments. Tensors of dataclasses too."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, copy=True)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            leaf = replace(leaf, **to(device, vars(leaf)))
        return leaf.on(device) if isinstance(leaf, Loaded) else leaf

    return tree_map(moved, value)


def checked_calls(device: str) -> AbstractContextManager[Any]:
    """Stops calls of torch_npu that its documentation excludes, before they are made."""
    return CheckedCalls() if device == "npu" else nullcontext()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of a result, and of the fields of its dataclasses."""
    tensors = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):
            tensors += tensors_of(list(vars(leaf).values()))
    return tensors


def distance(found: torch.Tensor, expected: torch.Tensor, roundings: int) -> tuple[float, float]:
    """(largest difference, the same as a share of what is allowed); infinite for other shapes."""
    found = found.cpu()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf"), float("inf")
    if not found.numel():
        return 0.0, 0.0
    if found.dtype not in TOLERANCES:
        difference = (found != expected).any().item()
        return float(difference), float("inf") if difference else 0.0
    # Equal infinities are no difference; what is not finite on one side is the largest there is.
    largest = {"nan": float("inf"), "posinf": float("inf")}
    difference = (found.double() - expected.double()).abs()
    difference = difference.masked_fill(found == expected, 0.0).nan_to_num(**largest)
    allowed = roundings * TOLERANCES[found.dtype] * (1 + expected.double().abs())
    return difference.max().item(), (difference / allowed).nan_to_num(**largest).max().item()


def check_call(call: BoundCall) -> Check:
    """Never raises: what a body raises is what was found."""
    return found_by(call.name, lambda: _compared(call))


def _compared(call: BoundCall) -> Check:
    reason = call.declined()
    if reason:
        return Check(call.name, None, note=reason)
    args, kwargs = call.prepare(call.device)
    with checked_calls(call.device):
        found = call.body(*args, **kwargs)
    reference_args, reference_kwargs = call.prepare("cpu")
    case = call.case
    oracle = case.oracle or call.op.implementation(REFERENCE)
    expected = oracle(*reference_args, **reference_kwargs)
    # Of most operators the arguments too: what was written in place counts as well.
    mine = tensors_of(case.compared(found, args))
    theirs = tensors_of(case.compared(expected, reference_args))
    pairs = zip(mine, theirs, strict=True)
    errors = [distance(one, right, case.roundings) for one, right in pairs]
    largest, share = (max(column) for column in zip(*errors, strict=True))
    body = call.op.choose(call.device).name
    measured = {"body": body, "largest error": largest, "share of tolerance": share}
    return Check(call.name, share <= 1, measured)


def check_operators(device: str, progress: Progress) -> list[Check]:
    # First what a compiler is known to get wrong: the rest of a report would not be worth reading.
    calls = [*calls_over_tiles(device), *bound_calls(device)]
    checks = []
    for call in calls:
        progress(call.name, len(calls))
        checks.append(check_call(call))
    return checks
