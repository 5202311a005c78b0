"""Numba's ``njit`` and ``cfunc`` whose compiled code is kept on disk until a source changes.

A compiled function holds those that it calls, with their constants, from other files too. Numba
asks for the time of the function's own file alone, and would run the others as they were. So here
the content of all files of this folder counts, beyond which kernels use nothing of the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CacheImpl

SOURCES = Path(__file__).parent
_NUMBAS_OWN = tuple(CacheImpl._locator_classes)


@cache
def source_stamp() -> str:
    """As the files were when the first kernel of this process was defined."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class PackageLocator:
    """For functions of these files: the folder that Numba would choose, and that stamp."""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Any:
        if not Path(py_file).is_relative_to(SOURCES):
            return None
        locators = (own.from_function(py_func, py_file) for own in _NUMBAS_OWN)
        locator: Any = next(filter(None, locators), None)
        if locator is not None:
            locator.get_source_stamp = source_stamp
        return locator


CacheImpl._locator_classes.insert(0, PackageLocator)

njit = partial(numba.njit, cache=True)
cfunc = partial(numba.cfunc, cache=True)
