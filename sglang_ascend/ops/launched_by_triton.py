"""How an operator's Triton body is registered: for the devices that Triton compiles for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from sglang_ascend.ops.dispatch import Implementation


def is_available() -> bool:
    return find_spec("triton") is not None


def triton_body(function: Callable[..., Any], accepts: Callable[..., bool]) -> Implementation:
    """``accepts`` says which layouts the kernel's raw pointers are right for."""
    return Implementation(
        "triton", function, frozenset({"cuda", "npu"}), is_available, accepts=accepts
    )
