"""What every test on the emulated NPU gets: an idle device, and none of its errors unseen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch_npu

from npu_emulation.counters import left_undone
from npu_emulation.device_work import raise_failures
from npu_emulation.numerics import Numerics

if TYPE_CHECKING:
    from greedy_oracle import Oracle

# The number by which torch_npu's own Meta kernels know the SoCs.
SOCS = {"Ascend910B3": 223, "Ascend910_9392": 253, "Ascend950PR_9599": 260}


@pytest.fixture(autouse=True, scope="session")
def only_harmless_functions_are_stubs() -> Iterator[None]:
    """Nothing that the tests' programs called was left undone in silence."""
    yield
    assert left_undone() == []


@pytest.fixture(autouse=True)
def idle_device() -> Iterator[None]:
    torch.npu.synchronize()
    raise_failures()
    torch.manual_seed(0)
    yield
    torch.npu.synchronize()
    raise_failures()


@pytest.fixture(params=SOCS)
def soc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each SoC in turn, as torch_npu's Meta kernels tell them apart."""
    registrations = torch_npu.op_plugin.meta._meta_registrations
    number = SOCS[request.param]
    monkeypatch.setattr(registrations, "get_soc_version", lambda: number, raising=False)
    return request.param


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, in dimensions that SGLang's NPU path takes."""
    from sglang_ascend.models import random_deepseek  # loads transformers

    folder = tmp_path_factory.mktemp("deepseek")
    random_deepseek.build(folder, token_weight=1.0, yarn=None)
    return folder


@pytest.fixture(scope="session")
def oracle(deepseek: Path) -> Oracle:
    from greedy_oracle import Oracle  # loads transformers

    return Oracle(deepseek)


@pytest.fixture(scope="session")
def guessable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `deepseek`, and some of its MTP layer's drafts are right."""
    from sglang_ascend.models import random_deepseek

    folder = tmp_path_factory.mktemp("guessable")
    random_deepseek.build(folder, yarn=None)
    return folder


@pytest.fixture(scope="session")
def exact(guessable: Path) -> Oracle:
    from greedy_oracle import Oracle

    return Oracle(guessable)


@pytest.fixture
def numerics() -> Iterator[Numerics]:
    with Numerics() as mode:
        yield mode
