"""Every method of the platform that SGLang leaves open has an answer on the CPU.

Which those are is read from SGLang's own classes: a version that adds one fails here, and not in
the scheduler of a running server.
"""

from __future__ import annotations

import inspect

import pytest
import torch

pytestmark = pytest.mark.sglang

ARGUMENTS = {"algorithm": "MTP", "device_id": 0, "device": torch.device("cpu")}


def left_open() -> list[str]:
    """The methods of SGLang's platform whose body raises NotImplementedError."""
    from sglang.srt.platforms.interface import SRTPlatform

    methods = inspect.getmembers(SRTPlatform, inspect.isfunction)
    return [name for name, body in methods if "NotImplementedError" in body.__code__.co_names]


def unanswered(platform: object) -> set[str]:
    without = set()
    for name in left_open():
        method = getattr(platform, name)
        arguments = {
            parameter: ARGUMENTS[parameter] for parameter in inspect.signature(method).parameters
        }
        try:
            method(**arguments)
        except NotImplementedError:
            without.add(name)
    return without


def test_every_method_that_sglang_leaves_open_has_an_answer():
    from sglang_ascend.plugin.cpu.platform import EmulationPlatform

    assert unanswered(EmulationPlatform()) == set()


def test_sglang_s_own_cpu_methods_leave_these_open():
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import SRTPlatform

    platform = type("WithoutOurs", (CpuDeviceMixin, SRTPlatform), {})()
    assert unanswered(platform) == {
        "get_default_attention_backend",
        "get_default_speculative_draft_attention_backend",
        "get_torch_profiler_activity",
        "get_torch_profiler_activity_str",
    }


def test_the_profiler_s_activity_is_one_that_torch_has():
    from sglang_ascend.plugin.cpu.platform import EmulationPlatform

    platform = EmulationPlatform()
    activity = platform.get_torch_profiler_activity()
    assert activity in torch.profiler.supported_activities()
    assert activity.name == platform.get_torch_profiler_activity_str()
