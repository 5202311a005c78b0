"""Checks calls of torch_npu's operators as they are made, before they reach the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from sglang_ascend.ops.npu.constraints import CONSTRAINTS


class CallRefused(ValueError):
    """A call that the operator's documentation excludes."""


def refusal(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """What the documentation of ``npu::name`` holds against a call, None where nothing does.

    Does not synchronise. Raises KeyError for an operator that has no constraints here.
    """
    constraints = CONSTRAINTS[name]
    try:
        call = constraints.bind(args, kwargs)
    except TypeError as error:
        return str(error)
    # One by one, for a rule may rely on those before it.
    broken = next((rule for rule in constraints.rules if not rule.holds(call)), None)
    return broken and f"{name}: {broken.says} ({broken.source})."


class CheckedCalls(TorchFunctionMode):
    """While entered, a call of an ``npu::`` operator raises CallRefused instead of being made.

    Sees the arguments as the caller wrote them: the dispatcher has by then read a tensor that
    stands where host integers belong. Operators without constraints pass and
    are named in ``unknown``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = _npu_operator(func)
        if name is not None and name not in CONSTRAINTS:
            self.unknown.add(name)
        elif name is not None:
            found = refusal(name, args, kwargs or {})
            if found:
                raise CallRefused(found)
        return func(*args, **(kwargs or {}))


def _npu_operator(func: Callable[..., Any]) -> str | None:
    """ "npu_swiglu" of ``torch.ops.npu.npu_swiglu`` and of its overloads, else None."""
    if isinstance(func, OpOverload):
        func = func.overloadpacket
    if not isinstance(func, OpOverloadPacket):
        return None
    namespace, _, name = func._qualified_op_name.partition("::")
    return name if namespace == "npu" else None
