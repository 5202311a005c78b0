"""Where a trained layer comes from: data, settings, losses, versions, commit."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open

from sglang_ascend.checkpoint.reader import read_json_object
from sglang_ascend.training.generation.conversation import REPLY, TEXT, USER
from sglang_ascend.training.generation.shards import read_shard
from sglang_ascend.training.run_folder import opened_checkpoint

PACKAGES = ("torch", "transformers", "safetensors", "numpy")


def record(data: Path, run: Path) -> dict[str, Any]:
    """What the shards in `data` and the training in `run` say of themselves.

    Raises:
        FileNotFoundError: nothing was trained in `run`.
        ValueError: a file of it was damaged since.
    """
    with opened_checkpoint(run) as file:
        progress = json.loads(file.metadata()["progress"])
    return {
        "commit": git_commit(),
        "hardware": f"{platform.machine()}, {progress['config'].get('dtype')}, "
        f"{progress.get('device', 'cpu')}",
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        "data": generated(data),
        "settings": {"training": progress["config"], "loss": progress["loss"]},
        "training": last_losses(run / "log.jsonl"),
    }


def git_commit() -> str | None:
    """The commit of the checkout around the working directory, or None outside one."""
    command = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def generated(data: Path) -> dict[str, Any]:
    """Tokens that the target wrote in each shard of `data`, conversations, how many greedy; and
    the tokens of text that others wrote."""
    counts, text, conversations, greedy = {}, 0, 0, 0
    for path in sorted(data.glob("*.safetensors")):
        roles = read_shard(path)["roles"]
        with safe_open(path, "pt") as file:
            temperatures = json.loads(file.metadata()["temperatures"])
        counts[path.name] = int(((roles == USER) | (roles == REPLY)).sum())
        text += int((roles == TEXT).sum())
        conversations += len(temperatures)
        greedy += sum(temperature == 0 for temperature in temperatures)
    return {
        "sampled_tokens": sum(counts.values()),
        "text_tokens": text,
        "shards": counts,
        "conversations": conversations,
        "greedy": greedy,
    }


def last_losses(log: Path) -> dict[str, Any]:
    """Steps, rows and the mean distance of each recursion step over the last 20 log entries."""
    lines = read_log(log)
    if not lines:
        raise ValueError(f"{log} says of no step: put the log of that training there.")
    last = lines[-20:]
    steps = zip(*(line["losses"] for line in last), strict=True)
    return {
        "steps": lines[-1]["step"],
        "trained_tokens": sum(line["rows"] for line in lines),
        "losses": [round(sum(step) / len(last), 4) for step in steps],
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log of steps; of a step that was done again after a kill, its last."""
    by_step = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # what a kill cut
        by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by the files' names, or by whole paths of those that have one name."""
    distinct = list(dict.fromkeys(paths))
    times = Counter(path.name for path in distinct)
    return {path.name if times[path.name] == 1 else str(path): sha256(path) for path in distinct}


def digest(content: Any) -> str:
    """Short, of a list or whatever JSON can hold: what a stage remembers of it."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return "content " + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def read_json(path: Path) -> Any:
    """Raises ValueError: the file holds none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path} is not JSON ({error}): repair it.") from None


def read_facts(facts: Path | None, pairs: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The object in `facts`, and of each NAME=FILE.json what the file holds.

    Raises:
        ValueError: one has another form.
    """
    found = {}
    for pair in pairs:
        name, _, file = pair.partition("=")
        if not file:
            raise ValueError(f"--add {pair} names no file: write NAME=FILE.json.")
        found[name] = read_json(Path(file))
    return read_json_object(facts) if facts else {}, found
