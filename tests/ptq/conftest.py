"""nano-deepseek and its W8A8, quantized once in a run, and a tiny checkpoint of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_targets import FAMILIES, write_target

from sglang_ascend.models import catalog
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.training.export import export
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer


@pytest.fixture(scope="session")
def nano() -> Path:
    return catalog.model_path("nano-deepseek")


@pytest.fixture(scope="session")
def nano_w8a8(nano, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "w8a8"
    Quantization(nano, read_recipe("w8a8"), out).run()
    return out


@pytest.fixture(scope="session", params=FAMILIES)
def with_mtp(request, tmp_path_factory) -> Path:
    """A random checkpoint of each family with a random MTP layer."""
    folder = tmp_path_factory.mktemp(request.param)
    target = Target.open(write_target(folder / "target", request.param))
    export(target, new_layer(target, seed=0), folder / "whole")
    return folder / "whole"
