"""Which of a test's parameters CI serves on the emulated NPU, where each is a server of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: str, names: Iterable[str]) -> list[Any]:
    """Parameters: all of ``names``, of which only ``quick`` is not slow."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
