"""Invariant: two processes of torchrun train as one process does on both their batches."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_targets import write_target

from sglang_ascend.training.generation.generate import generate_shards
from sglang_ascend.training.generation.generator import GenerateConfig
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.provenance import read_log
from sglang_ascend.training.run_folder import read_average
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import started_layer
from sglang_ascend.training.trainer import TrainConfig, Trainer

STEPS, PER_BATCH = 8, 120
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
CONFIG = TrainConfig(max_steps=STEPS, tokens_per_batch=PER_BATCH, muon_rate=0.0)


class JoinedTrainer(Trainer):
    """One process, whose batches are those of two that split the shards."""

    shares = (slice(0, None, 2), slice(1, None, 2))

    def _begin_pass(self, shards):
        parts = []
        for share in self.shares:
            super()._begin_pass(shards[share])
            parts.append((self.sequences, self.batches))
        self.shards = shards
        self.sequences, self.batches = [], []
        offsets = []
        for sequences, _ in parts:
            offsets.append(len(self.sequences))
            self.sequences = self.sequences + sequences
        for batches in zip(*(batches for _, batches in parts), strict=False):
            pairs = zip(batches, offsets, strict=True)
            self.batches.append([i + offset for batch, offset in pairs for i in batch])


class FirstAlone(JoinedTrainer):
    """The control: the other process's gradients are not joined."""

    shares = (slice(0, None, 2),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    target = Target.open(write_target(folder / "target", "LlamaForCausalLM"))
    config = GenerateConfig(rows=8, max_length=60, max_reply_tokens=14, sequences_per_shard=5)
    generate_shards(target, folder / "data", config, set(), 500)
    return folder


def train_here(folder: Path, kind: type[Trainer]) -> dict[str, torch.Tensor]:
    target, out = Target.open(folder / "target"), folder / kind.__name__
    layer = started_layer(target, folder / "data", out, 0, from_scratch=False)
    embedding, head = target.embedding_and_head()
    kind(layer, embedding, head, folder / "data", out, CONFIG, LossConfig()).run()
    return read_average(out)


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], start) -> float:
    """|one - two| as a share of the way from `start` to `one`."""
    names = start.keys()
    far = sum((one[name] - two[name]).square().sum() for name in names)
    way = sum((one[name] - start[name]).square().sum() for name in names)
    return float((far / way).sqrt())


def test_two_processes_train_as_one_over_both_batches(folder):
    command = ["-m", "sglang_ascend", "train", "train", "--target", str(folder / "target")]
    command += ["--data", str(folder / "data"), "--out", str(folder / "both"), "--muon-rate", "0"]
    command += ["--max-steps", str(STEPS), "--tokens-per-batch", str(PER_BATCH)]
    done = subprocess.run([*TORCHRUN, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    both, joined = read_average(folder / "both"), train_here(folder, JoinedTrainer)
    alone = train_here(folder, FirstAlone)
    target = Target.open(folder / "target")
    start = started_layer(target, folder / "data", folder / "none", 0, from_scratch=False)
    begin = {name: value.detach() for name, value in start.named_parameters()}
    found, control = apart(joined, both, begin), apart(joined, alone, begin)
    print(f"{found:.1e} of the way apart; {control:.2f} without the other's gradients")
    assert found < 1e-3 < 0.1 < control
    logs = [read_log(folder / name / "log.jsonl") for name in ("both", "JoinedTrainer")]
    assert [line["rows"] for line in logs[0]] == [line["rows"] for line in logs[1]]
    for one, two in zip(*logs, strict=True):
        assert one["losses"] == pytest.approx(two["losses"], abs=2e-4)


OPENS_A_GROUP = """
from pathlib import Path
import torch.distributed as dist
from sglang_ascend.training.parallel import trainer_class
try:
    with trainer_class(Path(__file__).with_name("out")) as trainer:
        assert dist.is_initialized()
        raise SystemExit(trainer.__name__ != "ParallelTrainer")
finally:
    assert not dist.is_initialized(), "gloo's threads outlive the training"
"""


def test_the_group_is_closed_after_training_that_fails_too(tmp_path):
    program = tmp_path / "opens_a_group.py"
    program.write_text(OPENS_A_GROUP)
    done = subprocess.run([*TORCHRUN, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
