"""The tiny checkpoints of `tiny_targets`, each written once in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_targets import write_target

from sglang_ascend.training.targets.families import Target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """The opened checkpoint of a family; each is written once."""
    made: dict[str, Path] = {}

    def opened(family: str) -> Target:
        if family not in made:
            made[family] = write_target(tmp_path_factory.mktemp(family), family)
        return Target.open(made[family])

    return opened
