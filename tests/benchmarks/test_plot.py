"""The plot of README has a bar for each figure, as tall as the figure is large."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from typer.testing import CliRunner

from benchmarks import plot

REPORT = {
    "machine": "a machine",
    "commit": "abc1234",
    "model": "smollm2-mtp",
    "batch_1": {"plain_tokens_per_s": 10.0, "mtp_tokens_per_s": 20.0},
    "batch_8": {"plain_tokens_per_s": 40.0, "mtp_tokens_per_s": 35.0},
}
SMOLLM2 = {"all": {"conditional": [0.5, 0.25, 0.4]}}
NANO = {"greedy": {"maths": {"conditional": [0.9, 1.0, 0.8]}}}
SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_tall_as_their_figures(tmp_path):
    files = [tmp_path / name for name in ("bench.json", "smollm2.json", "nano.json")]
    for path, report in zip(files, (REPORT, SMOLLM2, NANO), strict=True):
        path.write_text(json.dumps(report))
    app = plot.typer.Typer()
    app.command()(plot.main)
    arguments = [*map(str, files), "--out", str(tmp_path / "out.svg")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    heights = [float(bar.attrib["height"]) for bar in root.findall(f"{SVG}rect")[1:]]
    speeds, shares = heights[:4], heights[4:]
    assert [round(height / speeds[0], 1) for height in speeds] == [1.0, 2.0, 4.0, 3.5]
    assert [round(height / shares[4], 2) for height in shares] == [0.5, 0.25, 0.4, 0.9, 1.0, 0.8]
    assert "abc1234" in "".join(root.itertext())
