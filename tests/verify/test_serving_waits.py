"""A step's waits are the lines that torch_npu's debug mode writes for the steps alone: those of
prefill and of the first reply are not a step's.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ascend import env
from sglang_ascend.plugin.npu import waits
from sglang_ascend.verify import serving_waits
from sglang_ascend.verify.checks import Check
from sglang_ascend.verify.serving import Setting
from sglang_ascend.verify.serving_waits import check_waits, waits_per_step

LINE = (
    "[W1122 NPUFunctions.cpp:480] Warning: called a synchronizing NPU operation (function "
    "warn_or_error_on_sync)\n"
)
WAITS_OF_A_START, WAITS_OF_A_PREFILL = 30, 3


class FakeServer:
    """Writes lines for its start, a prefill and each step; a step emits ``tokens_per_step``."""

    def __init__(self, waits: float, tokens_per_step: int = 1) -> None:
        self.waits, self.tokens_per_step = waits, tokens_per_step
        self.text = WAITS_OF_A_START * LINE

    def log(self) -> str:
        return self.text

    def generate(self, input_ids: Any, sampling_params: dict[str, int]) -> list[dict[str, Any]]:
        steps = (sampling_params["max_new_tokens"] - 1) // self.tokens_per_step
        self.text += (WAITS_OF_A_PREFILL + round(self.waits * steps)) * LINE + "Decode batch\n"
        meta = {"spec_verify_ct": steps} if self.tokens_per_step > 1 else {}
        return [{"meta_info": meta, "output_ids": []} for _ in input_ids]


@pytest.mark.parametrize(("waits", "tokens_per_step"), [(0, 1), (2, 1), (3, 2), (0, 3)])
def test_what_a_step_adds_is_counted(waits, tokens_per_step):
    server: Any = FakeServer(waits, tokens_per_step)
    assert waits_per_step(server) == pytest.approx(waits)


@pytest.fixture
def servers(monkeypatch) -> dict[str, FakeServer]:
    """What runs; the environment must ask for the debug mode."""
    running: dict[str, FakeServer] = {}

    @contextmanager
    def fake(setting: Setting, environment: dict[str, str]):
        assert env.LOG_WAITS.get(environment)
        yield running, [Check(f"the server starts, {kind}", True) for kind in running]

    monkeypatch.setattr(serving_waits, "running", fake)
    return running


def check(tmp_path: Path, device: str = "npu") -> dict[str, Check]:
    setting = Setting(tmp_path / "m", device, tmp_path, rounds=1, name="m")
    return {found.name: found for found in check_waits(setting, lambda what, total: None)}


@pytest.mark.parametrize(("waits", "passed"), [(0, True), (1, False)])
def test_a_step_with_mtp_must_not_wait(servers, tmp_path, waits, passed):
    servers.update(plain=FakeServer(2), mtp=FakeServer(waits, tokens_per_step=2))
    found = check(tmp_path)
    assert found["m: waits per step, plain"].passed is None
    assert found["m: waits per step, plain"].measured == {"waits": 2.0}
    assert found["m: waits per step, mtp"].passed is passed


def test_what_a_server_that_dies_cannot_the_others_still_show(servers, tmp_path):
    def died(**fields: Any) -> None:
        raise ConnectionResetError("no reply")

    servers.update(plain=FakeServer(2), mtp=FakeServer(0, tokens_per_step=2))
    servers["plain"].generate = died  # type: ignore[method-assign]
    found = check(tmp_path)
    assert found["m: the server starts, plain"].passed
    assert found["m: waits per step, plain"].passed is False
    assert found["m: waits per step, plain"].note == "ConnectionResetError: no reply"
    assert found["m: waits per step, mtp"].passed


def test_without_a_device_nothing_is_started_or_judged(tmp_path):
    (found,) = check(tmp_path, "cpu").values()
    assert found.passed is None and "no device" in found.note


@pytest.mark.parametrize(
    ("value", "installed", "modes"),
    [(None, True, []), ("", True, []), ("1", True, ["warn"]), ("1", False, [])],
)
def test_a_server_logs_its_waits_only_where_it_is_asked_to_and_has_torch_npu(
    monkeypatch, value, installed, modes
):
    import torch

    set_modes: list[str] = []
    npu = type("npu", (), {"set_sync_debug_mode": staticmethod(set_modes.append)})
    monkeypatch.setattr(torch, "get_device_module", lambda name: npu)
    monkeypatch.setattr(waits, "find_spec", lambda name: name if installed else None)
    monkeypatch.delenv(env.LOG_WAITS.name, raising=False)
    if value is not None:
        monkeypatch.setenv(env.LOG_WAITS.name, value)
    waits.log_waits()
    assert set_modes == modes
