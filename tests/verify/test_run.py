"""verify-npu claims nothing without an NPU, resumes after a kill, and says what it ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_ascend.cli import Part, app
from sglang_ascend.models import catalog
from sglang_ascend.verify import machine, report, run
from sglang_ascend.verify.checks import Check, PartResult
from sglang_ascend.verify.machine import EMULATED, REHEARSAL, Machine
from sglang_ascend.verify.run import NOT_EMULATED, PARTS, Verification

RUNNER = CliRunner()
CPU = Machine("cpu", REHEARSAL, {"device": "a CPU"})
QUIET = Console(quiet=True)


@pytest.fixture
def parts_run(monkeypatch) -> list[str]:
    """Names of the parts that were run; each finds one check that passed."""
    names: list[str] = []

    def run_part(self: Verification, part: str, progress: object) -> list[Check]:
        names.append(part)
        return [Check(f"{part} is right", True, {"error": 0.5})]

    monkeypatch.setattr(Verification, "run_part", run_part)
    return names


def verification(folder: Path, **changes: object) -> Verification:
    return Verification(
        **{"machine": CPU, "models": (Path("m"),), "folder": folder, "rounds": 1} | changes
    )


def test_without_an_npu_one_sentence_says_so_and_nothing_is_written(tmp_path):
    words = [sys.executable, "-m", "sglang_ascend", "verify-npu", "--out", tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "sglang-ascend: no NPU here: torch_npu is not installed, so nothing was verified.\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("count", "said"), [(0, "torch_npu sees no device"), (None, "could not be loaded (no driver)")]
)
def test_an_npu_that_cannot_be_used_is_none(monkeypatch, count, said):
    import torch

    def device_count() -> int:
        if count is None:
            raise RuntimeError("no\ndriver")
        return count

    npu = type("npu", (), {"device_count": staticmethod(device_count)})
    monkeypatch.setattr(torch, "get_device_module", lambda name: npu)
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    with pytest.raises(machine.NoNpuError) as error:
        machine.describe("npu")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_an_npu_says_of_itself_is_in_the_facts(monkeypatch, tmp_path):
    info = tmp_path / "x86_64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\n")
    smi = tmp_path / "npu-smi"
    smi.write_text('#!/bin/sh\necho "+---+"\necho "| npu-smi 24.1 Version: 24.1 |"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(machine.EMULATION, raising=False)
    monkeypatch.setattr(machine, "npu_name", lambda: ("Ascend910B3", 8))
    found = machine.describe("npu")
    assert found.label == "measured on Ascend910B3" and not found.is_emulated
    facts = {"devices": "8", "CANN": "8.5.0", "npu-smi": "npu-smi 24.1 Version: 24.1"}
    assert facts.items() <= found.facts.items()
    monkeypatch.setenv(machine.EMULATION, "/libraries")
    assert machine.describe("npu").label == EMULATED


def test_an_emulated_npu_is_not_timed_and_serves_nothing(tmp_path):
    emulated = verification(tmp_path, machine=Machine("npu", EMULATED, {}))
    for part in ("operator-speed", "serving", "serving-waits"):
        assert emulated.run_part(part, lambda what, total: None) == [
            Check(part, None, note=NOT_EMULATED)
        ]


def test_the_command_knows_every_part():
    assert tuple(Part) == PARTS
    assert report.TITLES.keys() == set(PARTS)


def test_a_finished_part_is_not_found_again(tmp_path, parts_run):
    first = run.run(verification(tmp_path), console=QUIET)
    assert tuple(parts_run) == PARTS
    assert run.run(verification(tmp_path), console=QUIET) == first
    assert tuple(parts_run) == PARTS


def test_a_part_that_failed_is_done_again(tmp_path, parts_run, monkeypatch):
    run.run(verification(tmp_path), console=QUIET)
    path = tmp_path / f"{PARTS[1]}.json"
    path.write_text(path.read_text().replace("true", "false"))
    run.run(verification(tmp_path), console=QUIET)
    assert tuple(parts_run) == (*PARTS, PARTS[1])


def test_a_model_that_was_trained_on_is_verified_anew(tmp_path, parts_run):
    (model := tmp_path / "model").mkdir()
    (model / "model.safetensors").write_text("before")
    run.run(verification(tmp_path / "out", models=(model,)), console=QUIET)
    (model / "model.safetensors").write_text("trained on")
    run.run(verification(tmp_path / "out", models=(model,)), console=QUIET)
    assert tuple(parts_run) == (*PARTS, "serving", "serving-waits")


def test_two_folders_of_one_name_are_told_apart():
    models = [Path("a/model"), Path("b/model"), Path("c")]
    assert run.distinct_names(models) == ["model", "model-2", "c"]


def test_a_killed_run_goes_on_at_its_part(tmp_path, parts_run, monkeypatch):
    whole = Verification.run_part

    def killed(self: Verification, part: str, progress: object) -> list[Check]:
        if part == PARTS[1]:
            raise KeyboardInterrupt
        return whole(self, part, progress)

    monkeypatch.setattr(Verification, "run_part", killed)
    with pytest.raises(KeyboardInterrupt):
        run.run(verification(tmp_path), console=QUIET)
    assert [path.name for path in tmp_path.iterdir()] == [f"{PARTS[0]}.json"]
    monkeypatch.setattr(Verification, "run_part", whole)
    assert [result.part for result in run.run(verification(tmp_path), console=QUIET)] == list(PARTS)
    assert tuple(parts_run) == PARTS


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": Machine("cpu", REHEARSAL, {"device": "another CPU"})},
        {"machine": Machine("npu", "measured on a card", {"device": "a CPU"})},
    ],
)
def test_what_was_found_elsewhere_is_found_again(tmp_path, parts_run, changes):
    run.run(verification(tmp_path), console=QUIET)
    run.run(verification(tmp_path, **changes), console=QUIET)
    assert tuple(parts_run) == 2 * PARTS


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"rounds": 2}, ("operator-speed", "serving")),
        ({"models": (Path("m"), Path("other"))}, ("serving", "serving-waits")),
    ],
)
def test_another_setting_repeats_the_parts_that_it_changes(tmp_path, parts_run, changes, again):
    run.run(verification(tmp_path), console=QUIET)
    run.run(verification(tmp_path, **changes), console=QUIET)
    assert tuple(parts_run) == PARTS + again


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"part": 1}', '{"checks": [{"unknown": 1}]}'])
def test_a_damaged_result_is_found_again(tmp_path, parts_run, damage):
    run.run(verification(tmp_path), PARTS[:1], QUIET)
    (tmp_path / f"{PARTS[0]}.json").write_text(damage)
    (result,) = run.run(verification(tmp_path), PARTS[:1], QUIET)
    assert result.checks[0].passed and len(parts_run) == 2


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command on the CPU with a model that is not built."""
    monkeypatch.setattr(catalog, "model_path", lambda name: tmp_path / name)
    arguments = ["verify-npu", "--device", "cpu", "--out", str(tmp_path / "out")]
    return lambda *more: RUNNER.invoke(app, [*arguments, *more])


def test_the_report_is_written_and_labelled(command, parts_run, tmp_path):
    result = command()
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/out/report.md\n")
    assert REHEARSAL in result.stderr and "5 of 5 checks passed." in result.stderr
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"**{REHEARSAL}**" in text and "| operators is right | pass | error 0.5 |" in text
    fields = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (fields["label"], fields["passed"]) == (REHEARSAL, True)
    assert [part["part"] for part in fields["parts"]] == list(PARTS)


def test_a_failed_check_is_exit_code_1(command, monkeypatch):
    failed = [Check("sum", False, {}, "wrong"), Check("time", None, {"µs": 2})]
    monkeypatch.setattr(Verification, "run_part", lambda self, part, progress: failed)
    result = command("--part", "operators")
    assert result.exit_code == 1
    assert "0 of 1 checks passed: sum." in result.stderr


def test_a_part_that_raises_is_reported_and_the_others_run(command, monkeypatch, tmp_path):
    def run_part(self: Verification, part: str, progress: object) -> list[Check]:
        if part == PARTS[0]:
            raise RuntimeError("no\ndriver")
        return [Check(f"{part} is right", True)]

    monkeypatch.setattr(Verification, "run_part", run_part)
    result = command()
    assert result.exit_code == 1
    assert f"4 of 5 checks passed: {PARTS[0]}." in result.stderr
    assert (
        f"| {PARTS[0]} | FAIL |  | RuntimeError: no driver |"
        in (tmp_path / "out" / "report.md").read_text()
    )


def test_an_unknown_model_is_exit_code_2(tmp_path):
    words = ["verify-npu", "--device", "cpu", "--model", "nosuch", "--out", str(tmp_path / "out")]
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith("sglang-ascend: 'nosuch' is not a model")


def test_a_note_cannot_break_the_table():
    checks = (Check("a", False, {}, "x | y\n<script>"), Check("b", None, {}, "no body"))
    text = report.markdown(CPU, [PartResult("operators", "k", 1.0, checks)])
    assert "| a | FAIL |  | x \\| y &lt;script> |" in text
    assert "- no body: b" in text
