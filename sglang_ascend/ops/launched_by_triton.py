"""How an operator's Triton body is registered: for the devices that Triton compiles for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from sglang_ascend.ops.dispatch import Implementation


def is_available() -> bool:
    return find_spec("triton") is not None


def triton_body(
    function: Callable[..., Any],
    accepts: Callable[..., bool],
    devices: frozenset[str] = frozenset({"cuda", "npu"}),
) -> Implementation:
    """``accepts`` says which layouts the kernel's raw pointers are right for.

    triton-ascend reads what a mask excludes, unless the mask is a run of places: a kernel that
    would leave its tensors by that is not for the NPU.
    """
    return Implementation("triton", function, devices, is_available, accepts=accepts)
