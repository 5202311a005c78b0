"""The log names the dtype that is served, and the faster one where that is another."""

from __future__ import annotations

import logging

import pytest
import torch

pytestmark = pytest.mark.sglang


@pytest.fixture
def platform():
    # SGLang imports the plugin's platform itself, and first.
    from sglang.srt.platforms import current_platform  # noqa: F401

    from sglang_ascend.plugin.cpu import platform

    return platform


@pytest.mark.parametrize(
    ("dtype", "cpu_multiplies_bfloat16", "faster"),
    [
        (torch.bfloat16, True, None),
        (torch.float32, False, None),
        (torch.float32, True, "--dtype bfloat16"),
        (torch.bfloat16, False, "--dtype float32"),
        (torch.float16, True, "--dtype bfloat16"),
    ],
    ids=str,
)
def test_the_log_says_which_dtype_is_faster(platform, dtype, cpu_multiplies_bfloat16, faster):
    said = platform.dtype_sentence(dtype, cpu_multiplies_bfloat16)
    assert said.startswith(f"Serving in {str(dtype).removeprefix('torch.')}")
    assert ("fastest" in said) is (faster is None)
    assert ("--dtype" in said) is (faster is not None)
    assert faster is None or faster in said


def test_a_target_and_its_draft_say_it_once(platform, caplog):
    platform.log_dtype.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            platform.EmulationPlatform().post_load_model(torch.nn.Linear(2, 2))
    said = [record.message for record in caplog.records if record.name == platform.__name__]
    assert [message.startswith("Serving in float32") for message in said] == [True]
