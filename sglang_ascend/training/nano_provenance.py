"""Owns nano-deepseek's provenance file: text and licences, commands, versions, seeds, figures."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from safetensors import safe_open

from sglang_ascend.training.generate import FORCED
from sglang_ascend.training.nano_questions import SEED

RECIPE = Path(__file__).parent / "recipes" / "nano-deepseek.sh"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def git_commit() -> str | None:
    """The checkout's commit, or None outside a checkout or before the first commit."""
    command = ["git", "-C", str(RECIPE.parent), "rev-parse", "--verify", "-q", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or None


def last_losses(log: Path, entries: int = 20) -> dict:
    """Steps, rows and the mean cross-entropy of each recursion step over the last log entries."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = lines[-entries:]
    steps = zip(*(line["losses"] for line in last), strict=True)
    return {
        "steps": lines[-1]["step"],
        "trained_tokens": sum(line["rows"] for line in lines),
        "soft_cross_entropy": [round(sum(step) / len(last), 4) for step in steps],
    }


def generated_tokens(shards: Path) -> dict[str, int]:
    """How many tokens of each shard the target wrote itself."""
    counts = {}
    for path in sorted(shards.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            counts[path.name] = int((file.get_tensor("roles") != FORCED).sum())
    return counts


def main(
    work: Annotated[Path, typer.Option(help="The recipe's work folder.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    note: Annotated[str, typer.Option(help="What this build did beside the recipe.")] = "",
) -> None:
    """Gather what the recipe's steps left behind into one JSON file."""

    def read(name: str) -> object:
        return json.loads((work / name).read_text(encoding="utf-8"))

    record = {
        "model": "nano-deepseek: DeepSeek-V3 architecture, one NextN layer, trained from scratch",
        "licence": "Apache-2.0; the text's own licences are listed by part",
        "corpus": read("corpus/corpus.json"),
        "recipe": "sglang_ascend/training/recipes/nano-deepseek.sh",
        "commands": [
            line for line in RECIPE.read_text(encoding="utf-8").splitlines() if line[:4] == "run "
        ],
        "note": note,
        "commit": git_commit(),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        "seeds": {"questions": SEED, "pretraining": 0, "generation": 1, "nextn": 0},
        "target": read("target/pretrain.json"),
        "generated_tokens": generated_tokens(work / "shards"),
        "nextn": last_losses(work / "nextn" / "log.jsonl"),
        "acceptance": read("acceptance.json"),
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
