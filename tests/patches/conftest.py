"""A function of SGLang as one patch leaves it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from patch_set import ROWS, cut_out, patched_files


@pytest.fixture
def patched(tmp_path) -> Callable[..., Any]:
    """``patched(number, name, **namespace)``: the function, run by itself among stand-ins."""

    def load(number: str, name: str, **namespace: Any) -> Any:
        (row,) = (row for row in ROWS if row["file"].startswith(number))
        sources = [path.read_text(encoding="utf-8") for path in patched_files(row, tmp_path)]
        defines = re.compile(rf"(def|class) {name.partition('.')[0]}\b")
        (source,) = filter(defines.search, sources)
        return cut_out(source, name, namespace)

    return load
