"""How a body over torch_npu is registered: for the NPU only, where torch_npu is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from sglang_ascend.ops.dispatch import Implementation


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    return find_spec("torch_npu") is not None


def npu_body(
    function: Callable[..., Any], accepts: Callable[..., bool] = lambda *args, **kwargs: True
) -> Implementation:
    """Implementation "npu"; it does not synchronise and takes no host lists, unless it says so."""
    return Implementation("npu", function, frozenset({"npu"}), _is_installed, accepts)
