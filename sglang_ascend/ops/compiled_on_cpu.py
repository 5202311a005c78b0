"""How an operator's compiled CPU body is registered: by Numba, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from sglang_ascend.ops.dispatch import Implementation


def is_available() -> bool:
    return find_spec("numba") is not None


def numba_body(function: Callable[..., Any], **options: Any) -> Implementation:
    """``options`` are further fields of Implementation, such as ``accepts``."""
    return Implementation("numba", function, frozenset({"cpu"}), is_available, **options)
