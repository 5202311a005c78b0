"""What a benchmark prints has every figure, whatever the width of the terminal."""

from __future__ import annotations

from benchmarks import attention, serving
from benchmarks.attention import Case


def test_servers_beside_each_other(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    results = [
        serving.Round({"plain": 123.4, "in_tree": 150.5, "mtp": mtp}, 2.25)
        for mtp in (246.8, 301.0)
    ]
    report = {"model": "m", "machine": "a machine", "batch_8": serving.summarise(results)}
    serving.print_table(report, [8], ["plain", "in_tree"])
    printed = capsys.readouterr().out
    assert "273.9" in printed and "123.4" in printed and "2.00 - 2.44" in printed
    assert printed.count("95 % interval") == 2 and "…" not in printed


def test_cases_below_each_other(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    case = Case("smollm2", "decode", 32, "uniform", "bf16", threads=1)
    figures = {"ours_us": 12345.0, "native_us": 54321.0, "bar": 3.0}
    figures |= {"ratio": 4.4, "ratio_low": 4.35, "ratio_high": 4.45}
    attention.print_table([vars(case) | figures], "one attention layer")
    printed = capsys.readouterr().out
    assert "12345" in printed and "54321" in printed and "4.35 - 4.45" in printed
    assert "uniform" in printed and "…" not in printed
