"""What every test gets: no network hubs, one thread, and none of the caller's SGLang switches."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Before anything imports torch or transformers, and inherited by the servers that tests start.
# One thread: two that wait for each other on a shared core take minutes for what takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
for switch in ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
    os.environ.pop(switch, None)

# A property holds however busy the machine is. Where CI is set Hypothesis derandomises by itself,
# which this inherits. The environments of npu_emulation and triton_ascend have no property tests.
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")

# What is imported and collected stays until the end: Python's searches for garbage among it would
# be half of the time of both, and would lengthen each later one.
gc.disable()

# These need the real torch_npu on emulated libraries: `make test-npu-emulated`, which sets this.
collect_ignore = [] if "NPU_EMULATION" in os.environ else ["npu_emulation"]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports what Python has not freed at its end


class ServersInOneWorker(LoadScopeScheduling):
    """A file is one worker's; so are all files that share the pool of servers. Documented commands
    come last and take minutes: whoever is free takes the next."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        if file == "tests/test_documented_commands.py":
            return nodeid
        return "servers" if file.startswith("tests/serving/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ServersInOneWorker:
    return ServersInOneWorker(config, log)
