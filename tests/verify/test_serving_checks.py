"""Replies are judged by the reference: a few ties may flip, anything else fails; and the whole part
runs here, two real servers on the CPU, as the rehearsal that it is called.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.models.catalog import model_path
from sglang_ascend.verify import serving
from sglang_ascend.verify.checks import Check
from sglang_ascend.verify.machine import REHEARSAL
from sglang_ascend.verify.reference_tokens import Judged
from sglang_ascend.verify.serving import (
    FLAGS,
    LIMITS,
    NEW_TOKENS,
    QUESTIONS,
    Setting,
    check_tokens,
    time_servers,
)
from sglang_ascend.verify.serving_waits import check_waits

BEST, CLOSE, WRONG = 7, 8, 9
# Of the reference: the gap of each token, and how much the best is ahead.
GAPS = {BEST: 0.0, CLOSE: 0.01, WRONG: 2.0}
MARGIN = 1.0
TIE = 0.05
LOGPROB = -0.5


class FakeReference:
    """Says BEST everywhere; CLOSE is a tie as far as its rounding goes."""

    has_experts = False

    def prompt(self, message: str) -> list[int]:
        return [len(message)]

    def judge(self, prompt: list[int], tokens: list[int]) -> Judged:
        gaps = [GAPS[token] for token in tokens]
        return Judged(
            gaps,
            [LOGPROB - gap for gap in gaps],
            [MARGIN] * len(tokens),
            [TIE] * len(tokens),
            [token == BEST for token in tokens],
        )


class FakeServer:
    """Says the same tokens to everyone, and its log-probabilities with an error."""

    def __init__(self, tokens: list[int], error: float = 0.02) -> None:
        self.tokens, self.error = tokens, error
        self.num_asked = 0

    def generate(self, input_ids: list[list[int]], **fields: Any) -> list[dict[str, Any]]:
        self.num_asked += 1
        rows = [[LOGPROB - GAPS[token] + self.error, token, None] for token in self.tokens]
        meta = {"output_token_logprobs": rows, "spec_verify_ct": 10}
        return [{"output_ids": self.tokens, "meta_info": meta} for _ in input_ids]


def judged(plain: list[int], mtp: list[int], error: float = 0.02) -> dict[str, bool | None]:
    servers: Any = {"plain": FakeServer(plain, error), "mtp": FakeServer(mtp, error)}
    reference: Any = FakeReference()
    return {check.name: check.passed for check in check_tokens(servers, reference)}


ROUNDING = "rounding is well below the model's margins"
PLAIN, MTP, ADAPTIVE = (f"greedy tokens against the reference, {name}" for name in FLAGS)


@pytest.mark.parametrize(
    ("plain", "mtp", "verdict"),
    [
        ([BEST] * 10, [BEST] * 10, (True, True)),
        ([BEST] * 10, [BEST, CLOSE] + [BEST] * 8, (True, True)),
        ([BEST] * 10, [BEST, BEST, WRONG] + [BEST] * 7, (True, False)),
        ([WRONG] + [BEST] * 9, [BEST] * 10, (False, True)),
        ([BEST] * 10, [CLOSE, CLOSE] + [BEST] * 8, (True, False)),  # more than one tie in ten
    ],
)
def test_a_token_may_differ_only_in_a_tie_and_seldom(plain, mtp, verdict):
    found = judged(plain, mtp)
    assert (found[PLAIN], found[MTP]) == verdict
    assert found[ROUNDING]


def test_a_server_s_own_errors_excuse_nothing():
    assert judged([BEST] * 4, [BEST, BEST, BEST, WRONG], error=5.0)[MTP] is False


def test_a_rounding_that_would_excuse_anything_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TIE", 2 * MARGIN)
    assert judged([BEST] * 4, [BEST] * 4)[ROUNDING] is False


@pytest.mark.parametrize(("num_wrong", "passed"), [(0, True), (1, True), (2, False)])
def test_a_model_of_experts_may_be_rerouted_once_in_200_tokens(num_wrong, passed):
    wrong = [True] * num_wrong + [False] * (256 - num_wrong)
    reply = Judged([2.0 * w for w in wrong], [], [], [TIE] * 256, [not w for w in wrong])
    assert serving.judge_tokens("", [reply], has_experts=True).passed is passed
    assert serving.judge_tokens("", [reply], has_experts=False).passed is (num_wrong == 0)


def test_the_acceptance_length_leaves_the_token_of_prefill_out():
    checks = check_tokens(
        {"plain": FakeServer([BEST] * 31), "mtp": FakeServer([BEST] * 31)},  # type: ignore[dict-item]
        FakeReference(),  # type: ignore[arg-type]
    )
    assert {"acceptance length": 3.0} in [check.measured for check in checks]


def test_rounds_alternate_and_a_step_is_a_forward_of_the_target(monkeypatch):
    seconds = iter([0, 9, 10, 19, 20, 22, 30, 34, 40, 44, 50, 52])
    monkeypatch.setattr(serving.time, "perf_counter", lambda: next(seconds))
    servers: Any = {"plain": FakeServer([BEST]), "mtp": FakeServer([BEST])}
    plain, mtp, ratio = time_servers(servers, [[1], [2]], batch=2, rounds=2)
    assert [server.num_asked for server in servers.values()] == [3, 3]
    # Rounds: one server first, then the other; times 2 and 4, then 4 and 2.
    assert sorted((ratio.measured["least"], ratio.measured["most"])) in ([0.5, 0.5], [2.0, 2.0])
    for check in (plain, mtp):
        times = check.measured["ms per step"] / 100, check.measured["tokens/s"]
        assert math.prod(times) == pytest.approx(2 * NEW_TOKENS)


def test_all_servers_are_on_loopback_and_differ_by_one_flag(tmp_path):
    setting = Setting(tmp_path / "model", "npu", tmp_path, rounds=1, name="m")
    plain, mtp, adaptive = (setting.arguments(name) for name in ("plain", "mtp", "adaptive"))
    assert mtp == [*plain, "--speculative-algorithm", "MTP"]
    assert adaptive == [*mtp, "--speculative-adaptive"]
    assert "bfloat16" in plain and "--host" not in plain


class FakeProcess(FakeServer):
    """Starts, unless its arguments say what it cannot."""

    broken: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()  # which start, and die when they are asked

    def __init__(
        self, arguments: list[str], log_path: Path, environment: dict[str, str] | None
    ) -> None:
        super().__init__([BEST] * 4)
        flags = arguments[arguments.index(LIMITS[-1]) + 1 :]
        (self.name,) = (name for name, given in FLAGS.items() if flags == [*given])
        self.log_path = log_path

    def wait_until_ready(self, timeout_s: float) -> None:
        if self.name in self.broken:
            raise RuntimeError("the server died at start:\nno such device")

    def generate(self, **fields: Any) -> list[dict[str, Any]]:
        if self.name in self.silent:
            raise ConnectionResetError("no reply")
        return super().generate(**fields)

    def log_tail(self) -> str:
        return "Traceback:\nEZ1001 of an operator"

    def stop(self) -> None:
        pass


def checks_of_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    monkeypatch.setattr(serving, "ServerProcess", FakeProcess)
    monkeypatch.setattr(serving, "ReferenceTokens", lambda folder, dtype: FakeReference())
    setting = Setting(tmp_path / "m", "cpu", tmp_path, rounds=1, name="m")
    return serving.check_serving(setting, lambda what, total: None)


@pytest.mark.parametrize("broken", [(), ("plain",), ("mtp",), ("plain", "mtp"), ("adaptive",)])
def test_what_one_server_cannot_the_others_still_show(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(FakeProcess, "broken", broken)
    checks = checks_of_fakes(tmp_path, monkeypatch)
    found = {check.name.removeprefix("m: "): check for check in checks}
    for name in FLAGS:
        started = found[f"the server starts, {name}"]
        assert started.passed is (name not in broken)
        assert started.note.endswith("no such device") == (name in broken)
        assert (f"greedy tokens against the reference, {name}" in found) == (name not in broken)
    for name in ("mtp", "adaptive"):
        both = {"plain", name}.isdisjoint(broken)
        assert (f"batch 1, output tokens/s, {name} / plain" in found) == both
        assert (f"replies are those without MTP, {name}" in found) == both


@pytest.mark.parametrize("silent", [("plain",), ("mtp",), ("plain", "adaptive"), tuple(FLAGS)])
def test_what_a_server_that_dies_at_its_first_request_cannot_the_others_still_show(
    tmp_path, monkeypatch, silent
):
    monkeypatch.setattr(FakeProcess, "silent", silent)
    checks = checks_of_fakes(tmp_path, monkeypatch)
    found = {check.name.removeprefix("m: "): check for check in checks}
    for name in silent:
        answers = found.pop(f"the server answers, {name}")
        assert answers.passed is False
        assert answers.note == (
            "ConnectionResetError: no reply; its log ends: Traceback: EZ1001 of an operator"
        )
    for name in FLAGS:
        assert (f"greedy tokens against the reference, {name}" in found) == (name not in silent)
        assert (f"batch 8, {name}" in found) == (name not in silent)
    assert not any(check.passed is False for check in found.values())


def test_a_server_that_dies_while_it_is_timed_keeps_what_was_found(tmp_path, monkeypatch):
    def died(*_: object) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(serving, "time_servers", died)
    *found, last = checks_of_fakes(tmp_path, monkeypatch)
    assert last.name == "m: the servers answer" and last.passed is False
    assert "m: greedy tokens against the reference, mtp" in {check.name for check in found}


def test_a_checkpoint_of_another_family_is_a_failed_check(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    setting = Setting(tmp_path, "cpu", tmp_path, rounds=1, name="m")
    (check,) = serving.check_serving(setting, lambda what, total: None)
    assert check.passed is False and "no reference is known" in check.note


@pytest.mark.parametrize("part", [serving.check_serving, check_waits])
def test_a_model_whose_latents_an_npu_does_not_take_is_left_out_and_no_failure(
    tmp_path, monkeypatch, part
):
    """nano-deepseek's, by torch_npu's documentation. The control has DeepSeek's own sizes."""

    def started(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("it was started")

    monkeypatch.setattr(serving, "ServerProcess", started)
    monkeypatch.setattr(serving, "ReferenceTokens", lambda folder, dtype: FakeReference())
    nano = Setting(model_path("nano-deepseek"), "npu", tmp_path, rounds=1, name="nano")
    (check,) = part(nano, lambda what, total: None)
    assert check.passed is None and "88 + 32 columns" in check.note and "512 + 64" in check.note
    served = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(served))
    like_v3 = Setting(tmp_path, "npu", tmp_path, rounds=1, name="v3")
    try:
        found = part(like_v3, lambda what, total: None)
    except RuntimeError as error:
        assert str(error) == "it was started"
    else:
        assert any("it was started" in check.note for check in found)


@pytest.mark.slow
@pytest.mark.sglang
def test_the_rehearsal_on_this_cpu_passes(tmp_path):
    """nano-deepseek, on three servers: their tokens, the reference's, and the times."""
    arguments = ["--device", "cpu", "--part", "serving", "--rounds", "1", "--out", str(tmp_path)]
    arguments += ["--model", "nano-deepseek"]
    result = CliRunner().invoke(app, ["verify-npu", *arguments])
    assert result.exit_code == 0, (tmp_path / "report.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["label"] == REHEARSAL
    checks = report["parts"][0]["checks"]
    found = {check["name"].removeprefix("nano-deepseek: "): check for check in checks}
    assert {name for name, check in found.items() if check["passed"]} == {
        *(f"the server starts, {name}" for name in FLAGS),
        ROUNDING,
        PLAIN,
        MTP,
        ADAPTIVE,
    }
    # In fp32 they are the same tokens, without an excuse.
    for name in ("mtp", "adaptive"):
        same = found[f"replies are those without MTP, {name}"]["measured"]
        assert same["identical"] == same["replies"] == len(QUESTIONS)
    assert found["tokens per target forward, mtp"]["measured"]["acceptance length"] > 1.3
