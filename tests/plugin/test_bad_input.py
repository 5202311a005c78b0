"""What cannot be served is refused in one sentence that names the file or flag and the remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from begun import template
from safetensors.torch import load_file, save_file

from sglang_ascend.models.catalog import model_path

WEIGHTS = "model.safetensors"
NEXTN = "model.layers.4."
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.sglang


@dataclass(frozen=True)
class Bad:
    """One start that must be refused: a defect of the checkpoint, or flags, and what is named."""

    names: tuple[str, ...]
    damage: Callable[[Path], object] = lambda folder: None
    flags: tuple[str, ...] = ()


def edit_config(**fields: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def edit_tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def edit_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def drop_mtp_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(NEXTN)]:
        del tensors[name]


def narrow_projection(tensors: Tensors) -> None:
    tensors[NEXTN + "eh_proj.weight"] = tensors[NEXTN + "eh_proj.weight"][:, :-1].contiguous()


def put_nan(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")


BAD_STARTS = {
    "no MTP layer": Bad(("--model-path", "eh_proj"), edit_tensors(drop_mtp_layer)),
    "no MTP layer declared": Bad(("num_nextn",), edit_config(num_nextn_predict_layers=0)),
    "truncated shard": Bad((WEIGHTS,), edit_bytes(lambda data: data[: len(data) // 2])),
    "corrupt header": Bad((WEIGHTS,), edit_bytes(lambda data: data[:8] + b"#" * 64 + data[72:])),
    "absurd header size": Bad((WEIGHTS,), edit_bytes(lambda data: b"\xff" * 8 + data[8:])),
    "empty shard": Bad((WEIGHTS,), edit_bytes(lambda data: b"")),
    "no weights": Bad((".safetensors",), lambda folder: (folder / WEIGHTS).unlink()),
    "wrong shape": Bad((WEIGHTS, "eh_proj"), edit_tensors(narrow_projection)),
    "NaN": Bad((WEIGHTS, "layers.1.self_attn.o_proj"), edit_tensors(put_nan)),
    "no tokenizer": Bad(("--tokenizer-path",), lambda folder: (folder / "tokenizer.json").unlink()),
    "no config": Bad(("config.json",), lambda folder: (folder / "config.json").unlink()),
    "config is no JSON": Bad(
        ("config.json",), lambda folder: (folder / "config.json").write_text("{")
    ),
    "unknown architecture": Bad(
        ("LlamaForCausalLM",), edit_config(architectures=["LlamaForCausalLM"], model_type="llama")
    ),
    "DeepSeek-V3.2": Bad(
        ("an index chooses", "index_topk"),
        edit_config(architectures=["DeepseekV32ForCausalLM"], index_topk=64),
    ),
    "unknown model path": Bad(("--model-path",), lambda folder: shutil.rmtree(folder)),
    "no steps": Bad(("--speculative-num-steps",), flags=("--speculative-num-steps", "0")),
    "too many steps": Bad(("--speculative-num-steps",), flags=("--speculative-num-steps", "16")),
    "a tree": Bad(("--speculative-eagle-topk",), flags=("--speculative-eagle-topk", "2")),
    "rows that do not fit": Bad(
        ("--speculative-num-draft-tokens",),
        flags=("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "6"),
    ),
    "unknown draft path": Bad(
        ("--speculative-draft-model-path",),
        flags=("--speculative-draft-model-path", "./no-such-folder"),
    ),
}
WITH_THE_COMMAND = ("truncated shard", "no MTP layer", "no tokenizer", "too many steps")


def assert_is_one_helpful_sentence(message: str, names: tuple[str, ...]) -> None:
    assert message.startswith("sglang-ascend: "), message
    assert "\n" not in message, message
    assert 40 < len(message) < 500, message
    for name in names:
        assert name in message, message


@pytest.fixture(scope="module")
def command_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The flags of every bad start; each checkpoint is a copy of nano-deepseek with one defect."""
    root, good = tmp_path_factory.mktemp("checkpoints"), model_path("nano-deepseek")
    lines = {"nothing bad": ["--model-path", str(good), "--speculative-algorithm", "MTP"]}
    for name, bad in BAD_STARTS.items():
        folder = shutil.copytree(good, root / name.replace(" ", "-"))
        bad.damage(folder)
        flags = ["--model-path", str(folder), "--speculative-algorithm", "MTP", *bad.flags]
        lines[name] = flags
    return lines


@pytest.fixture(scope="module")
def outcomes(
    command_lines: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, str]]:
    given = tmp_path_factory.mktemp("given") / "command_lines.json"
    given.write_text(json.dumps(command_lines))
    here = str(Path(__file__).parent)
    done = template().run(["refused_starts", str(given)], os.environ, 300, here)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_undamaged_checkpoint_is_accepted(outcomes: dict[str, tuple[str, str]]) -> None:
    """The control: it is the defect that is refused."""
    assert outcomes["nothing bad"] == ["accepted", ""]


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_is_refused_in_one_sentence(
    outcomes: dict[str, tuple[str, str]], name: str
) -> None:
    outcome, message = outcomes[name]
    assert outcome == "refused", (outcome, message)
    assert_is_one_helpful_sentence(message, BAD_STARTS[name].names)


def test_the_command_says_it_last_and_exits(command_lines: dict[str, list[str]]) -> None:
    begun = template()

    def launch(name: str) -> subprocess.CompletedProcess[str]:
        return begun.run(["sglang.launch_server", *command_lines[name]], os.environ, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(launch, WITH_THE_COMMAND))
    for name, process in zip(WITH_THE_COMMAND, ended, strict=True):
        assert process.returncode != 0, name
        assert "Traceback" not in process.stderr, process.stderr[-3000:]
        assert_is_one_helpful_sentence(process.stderr.splitlines()[-1], BAD_STARTS[name].names)
        assert "Uvicorn running" not in process.stdout + process.stderr
