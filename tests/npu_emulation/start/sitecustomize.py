"""Every Python process on the emulated NPU begins with this (environment.py): what `import sglang`
needs is there before it, and SGLang's scheduler, wherever it is spawned, computes numbers.

SGLang's commands stay as they are. A process that does not import sglang is left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Execute = Callable[[ModuleType], None]


def behind_stand_ins(execute: Execute, sglang: ModuleType) -> None:
    from npu_emulation import stand_ins

    stand_ins.install()
    execute(sglang)


def with_numbers(execute: Execute, scheduler: ModuleType) -> None:
    execute(scheduler)
    run = scheduler.run_scheduler_process

    @wraps(run)  # spawned by its name
    def run_with_numbers(*args: Any, **kwargs: Any) -> None:
        from npu_emulation.numerics import Numerics

        with Numerics():
            run(*args, **kwargs)

    scheduler.run_scheduler_process = run_with_numbers


AROUND = {"sglang": behind_stand_ins, "sglang.srt.managers.scheduler": with_numbers}


class StartFinder(MetaPathFinder):
    """Finds the modules of AROUND as Python does, and executes them within what is named there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in AROUND else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(AROUND[name], spec.loader.exec_module)
        return spec


if "NPU_EMULATION" in os.environ:
    sys.meta_path.insert(0, StartFinder())
