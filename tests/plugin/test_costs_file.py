"""SGLANG_ASCEND_ADAPTIVE_COSTS: what is refused before a weight is read, and what a step does."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
from resolved_arguments import assert_refused, resolve

from sglang_ascend.speculative.adaptive.costs import kept as kept_costs
from sglang_ascend.speculative.adaptive.costs.every_load import Costs
from sglang_ascend.speculative.adaptive.costs.kept import KeptCosts

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

VARIABLE = "SGLANG_ASCEND_ADAPTIVE_COSTS"
ADAPTIVE = "--speculative-algorithm MTP --speculative-adaptive"


def test_a_file_is_begun_before_any_process_starts(tiny_mimo, monkeypatch, tmp_path):
    path = tmp_path / "costs.json"
    monkeypatch.setenv(VARIABLE, str(path))
    resolve(tiny_mimo, ADAPTIVE)
    found = kept_costs.read(path)
    assert found.loads == [] and found.of["--model-path"] == str(tiny_mimo)
    resolve(tiny_mimo, ADAPTIVE)


@pytest.mark.parametrize("path", ["/dev/null/costs.json", "/nowhere/costs.json", "/", "  "])
def test_a_path_that_can_hold_none_is_refused(tiny_mimo, monkeypatch, path):
    monkeypatch.setenv(VARIABLE, path)
    assert_refused(tiny_mimo, ADAPTIVE, f"{VARIABLE}=")


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tiny_mimo, monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"mine": 1}')
    monkeypatch.setenv(VARIABLE, str(path))
    assert_refused(tiny_mimo, ADAPTIVE, f"{VARIABLE}: {path} holds no costs")
    assert path.read_text() == '{"mine": 1}'


@pytest.mark.parametrize("flag", ["--model-path", "--speculative-draft-model-path", "--tp-size"])
def test_costs_of_another_server_are_refused(tiny_mimo, monkeypatch, tmp_path, flag):
    path = tmp_path / "costs.json"
    monkeypatch.setenv(VARIABLE, str(path))
    resolve(tiny_mimo, ADAPTIVE)
    found = kept_costs.read(path)
    kept_costs.write(path, KeptCosts(of=found.of | {flag: "other"}, loads=[]))
    assert_refused(tiny_mimo, ADAPTIVE, f"with {flag} other")
    assert kept_costs.read(path).of[flag] == "other"


def test_without_adaptive_drafting_nothing_reads_it(tiny_mimo, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "costs.json"))
    named = f"{VARIABLE} without --speculative-adaptive"
    assert_refused(tiny_mimo, "--speculative-algorithm MTP", named)


@pytest.fixture
def costs_file(monkeypatch, tmp_path):
    from sglang_ascend.plugin.mtp.adaptive.kept_costs import make_costs_file

    monkeypatch.setenv(VARIABLE, str(tmp_path / "costs.json"))
    flags = {"model_path": "m", "speculative_draft_model_path": None, "tp_size": 1}
    return make_costs_file(SimpleNamespace(**flags))


def time_steps(costs: Costs) -> None:
    for k in (0, 0, 3, 3):
        costs.record(4, 100.0, k, 0.01 * (k + 1))


def test_it_is_written_while_a_server_serves(costs_file, tmp_path):
    from sglang_ascend.plugin.mtp.adaptive.kept_costs import STEPS_BETWEEN

    path = tmp_path / "costs.json"
    time_steps(costs_file.costs)
    for _ in range(STEPS_BETWEEN - 1):
        costs_file.step()
    assert kept_costs.read(path).loads == []
    costs_file.step()
    (load,) = kept_costs.read(path).loads
    assert [kind.drafts for kind in load.kinds] == [0, 3]


def test_a_file_that_cannot_be_written_any_more_stops_no_server(costs_file, monkeypatch, caplog):
    from sglang_ascend.plugin.mtp.adaptive.kept_costs import STEPS_BETWEEN

    def full(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * STEPS_BETWEEN):
            costs_file.step()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert VARIABLE in warning and os.strerror(28) in warning
