"""Invariant: a training computes on the device it is given, every batch, mask and weight of it, and
ends in the weights that the CPU ends in. No GPU is here: the device is pretended."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretended_device import pretended
from safetensors.torch import load_file
from tiny_targets import write_target
from typer.testing import CliRunner

from sglang_ascend.cli import app
from sglang_ascend.ops.attention import paged_gqa
from sglang_ascend.training import trainer
from sglang_ascend.training.data import collate
from sglang_ascend.training.interface import chain_mask
from sglang_ascend.training.run_folder import CHECKPOINT
from sglang_ascend.training.targets import decoder, device, layer

GPU = torch.device("cuda", 0)
STEPS = 6


@pytest.fixture
def gpu(monkeypatch):
    """The accelerator that this machine is said to have. Attention over pages is PyTorch's, there
    and on the CPU: a Triton kernel cannot run on a pretended one."""
    monkeypatch.setattr(device, "accelerator", lambda: torch.device("cuda"))
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(paged_gqa._bodies, kind, paged_gqa.bodies("any"))


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def train_mtp(target: Path, out: Path, where: str) -> None:
    (target.parent / "text.txt").write_text("Write the x ? a the user\n" * 9 + "a x ? the\n" * 9)
    command(
        *("train-mtp", target, "--out", out, "--held-out", target.parent / "held-out.json"),
        *("--tokens", 60, "--max-length", 64, "--max-new-tokens", 12, "--vocabulary", 8),
        *("--temperature-mix", "0,1", "--text", target.parent / "text.txt", "--text-tokens", 40),
        *("--max-steps", STEPS, "--tokens-per-batch", 200, "--num-steps", 2, "--threads", 1),
        *("--dtype", "float32", "--device", where, "--on-policy-rounds", 1),
    )


@pytest.fixture
def target(tmp_path) -> Path:
    (tmp_path / "held-out.json").write_text('["a x the ?", "Write a ? x"]')
    return write_target(tmp_path / "target", "LlamaForCausalLM")


def test_the_whole_command_computes_there_and_ends_in_the_cpus_weights(target, tmp_path, gpu):
    train_mtp(target, tmp_path / "cpu", "cpu")
    with pretended(GPU) as operations:
        train_mtp(target, tmp_path / "gpu", "auto")
    assert operations.count > 10_000
    cpu, there = (load_file(tmp_path / name / "run" / CHECKPOINT) for name in ("cpu", "gpu"))
    assert cpu.keys() == there.keys()
    assert all(torch.equal(cpu[name], there[name]) for name in cpu)
    reports = [(tmp_path / name / "acceptance.json").read_text() for name in ("cpu", "gpu")]
    assert reports[0] == reports[1]
    assert '"device": "cuda:0"' in (tmp_path / "gpu" / "model" / "provenance.json").read_text()


def cpu_positions(cache, positions):
    cache.positions = positions.cpu()


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (layer, "chain_mask", lambda slots, step, device: chain_mask(slots, step)),
        (trainer, "collate", lambda batch, steps, dtype, device: collate(batch, steps, dtype)),
        (decoder.RowCache, "begin", cpu_positions),
    ],
)
def test_what_is_made_on_the_cpu_instead_is_found(
    target, tmp_path, gpu, monkeypatch, module, name, broken
):
    """Controls: a mask, a batch and a position that are not on the device."""
    monkeypatch.setattr(module, name, broken)
    with pretended(GPU), pytest.raises(AssertionError, match="of the CPU"):
        train_mtp(target, tmp_path / "out", "cuda")


@pytest.mark.parametrize(
    ("here", "name", "rank", "found"),
    [
        (None, "auto", "0", "cpu"),
        ("cuda", "auto", "1", "cuda:1"),
        ("cuda", "cuda:3", "1", "cuda:3"),
        ("cuda", "cpu", "0", "cpu"),
    ],
)
def test_auto_is_the_accelerator_where_there_is_one(monkeypatch, here, name, rank, found):
    monkeypatch.setattr(device, "accelerator", lambda: here and SimpleNamespace(type=here))
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert str(device.compute_device(name)) == found
    assert device.dtype_of_products(None, torch.device(found)) == (
        "float32" if found == "cpu" else "bfloat16"
    )


def test_a_device_that_is_not_here_is_refused(target, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "accelerator", lambda: None)
    with pytest.raises(AssertionError, match="--device cuda is not on this machine"):
        train_mtp(target, tmp_path / "out", "cuda")
    with pytest.raises(AssertionError, match="'tape' is none that this PyTorch knows: pass auto"):
        train_mtp(target, tmp_path / "out", "tape")
    assert not (tmp_path / "out" / "data").exists()
