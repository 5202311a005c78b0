"""What every test on the emulated NPU gets: an idle device, and none of its errors unseen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_npu  # noqa: F401  (registers the device)

from npu_emulation.device_work import raise_failures
from npu_emulation.numerics import Numerics


@pytest.fixture(autouse=True)
def idle_device() -> Iterator[None]:
    torch.npu.synchronize()
    raise_failures()
    torch.manual_seed(0)
    yield
    torch.npu.synchronize()
    raise_failures()


@pytest.fixture
def numerics() -> Iterator[Numerics]:
    with Numerics() as mode:
        yield mode
