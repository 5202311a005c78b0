"""Hours of measuring are not lost with a plot: its place is looked at before."""

from __future__ import annotations

import sys

import pytest

from benchmarks import adaptive, command, losses


@pytest.mark.parametrize("benchmark", [adaptive, losses])
def test_a_plot_that_cannot_be_written_is_said_before_anything_is_measured(
    benchmark, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(benchmark, "model_folder", lambda name: pytest.fail("it began"))
    plot = tmp_path / "gone" / "plot.svg"
    words = [str(tmp_path / "work")] if benchmark is losses else []
    monkeypatch.setattr(sys, "argv", ["benchmark", *words, "--plot", str(plot)])
    with pytest.raises(SystemExit) as ended:
        command.run(benchmark.main, smoke="")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f"{plot.parent} is no folder: --plot needs one that exists." in said
