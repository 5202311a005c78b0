"""`sglang-ascend train …` on tiny targets: generate, train, export."""

from pathlib import Path

from typer.testing import CliRunner

from sglang_ascend.cli import app

STEPS = 4


def train(*arguments: object) -> str:
    """Runs `sglang-ascend train …`; returns what it printed on stdout."""
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_recipe(target: Path, work: Path, tokens: int, rows: int, *options: str) -> Path:
    """generate, train, export; returns the exported folder."""
    (work / "held_out.json").write_text('[{"domain": "any", "prompt": "Write the x ?"}]')
    data, run, out = work / "data", work / "run", work / "out"
    train(
        *("generate", "--target", target, "--data", data, "--exclude", work / "held_out.json"),
        *("--tokens", tokens, "--rows", rows, "--shard", 4),
    )
    (work / "text.txt").write_text("Write the user a x ? " * 8)
    train("text", "--target", target, "--data", data, "--text", work / "text.txt", "--tokens", 30)
    assert (data / "text-00000.safetensors").exists()
    train(
        *("train", "--target", target, "--data", data, "--out", run, "--max-steps", STEPS),
        *("--tokens-per-batch", 600, *options),
    )
    train("export", "--target", target, "--run", run, out)
    return out
