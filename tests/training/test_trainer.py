"""Invariant: a training killed after a checkpoint and run again ends in the identical weights."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from pretended_device import pretended
from safetensors.torch import load_file, save_file
from tiny_targets import FAMILIES

from sglang_ascend.training import data
from sglang_ascend.training import trainer as training
from sglang_ascend.training.generation.conversation import FORCED, REPLY, TEXT
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.muon import Muon
from sglang_ascend.training.provenance import read_log
from sglang_ascend.training.run_folder import read_average
from sglang_ascend.training.targets.layer import MTPLayer
from sglang_ascend.training.trainer import TrainConfig, Trainer

VOCABULARY, SIZE = 11, 24
CONFIG = TrainConfig(
    max_steps=9, tokens_per_batch=48, warmup_steps=2, loss_vocabulary=6, checkpoint_steps=4
)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tiny_target):
    return tiny_target(request.param)


class KilledError(RuntimeError):
    pass


class KilledTrainer(Trainer):
    """Dies in the middle of step 7, after the checkpoint of step 4."""

    def _train_step(self):
        if self.step == 6:
            raise KilledError
        return super()._train_step()


def write_data(folder):
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for shard in range(2):
        lengths = torch.randint(8, 20, (6,), generator=generator)
        total = int(lengths.sum())
        roles = torch.full((total,), REPLY, dtype=torch.uint8)
        for end, length in zip(lengths.cumsum(0).tolist(), lengths.tolist(), strict=True):
            roles[end - length : end - length + 4] = FORCED
        tensors = {
            "tokens": torch.randint(VOCABULARY, (total,), generator=generator).int(),
            "roles": roles,
            "hidden": torch.randn(total, SIZE, generator=generator).bfloat16(),
            "lengths": lengths.int(),
        }
        save_file(tensors, folder / f"shard-000-{shard:05d}.safetensors")


def write_short(path, length, count):
    """Texts of so many tokens, the first of each given."""
    tensors = {
        "tokens": torch.ones(length * count, dtype=torch.int32),
        "roles": torch.tensor(([FORCED] + [TEXT] * (length - 1)) * count, dtype=torch.uint8),
        "hidden": torch.ones(length * count, SIZE, dtype=torch.bfloat16),
        "lengths": torch.full((count,), length, dtype=torch.int32),
    }
    save_file(tensors, path)


def trainer(target, kind, data, out, config=CONFIG):
    generator = torch.Generator().manual_seed(5)
    layer = MTPLayer(target)
    layer.initialize(torch.ones(SIZE), 0.3, generator)
    embedding = torch.randn(VOCABULARY, SIZE, generator=generator)
    embedding, loss = embedding.to(target.device), LossConfig(num_steps=2)
    return kind(layer, embedding, embedding, data, out, config, loss)


def test_resuming_after_a_kill_gives_identical_weights(target, tmp_path):
    write_data(tmp_path / "data")
    trainer(target, Trainer, tmp_path / "data", tmp_path / "whole").run()
    with pytest.raises(KilledError):
        trainer(target, KilledTrainer, tmp_path / "data", tmp_path / "killed").run()
    trainer(target, Trainer, tmp_path / "data", tmp_path / "killed").run()
    whole = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    resumed = load_file(tmp_path / "killed" / "checkpoint.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_training_that_has_ended_keeps_what_it_says_of_itself(target, tmp_path):
    write_data(tmp_path / "data")
    trainer(target, Trainer, tmp_path / "data", tmp_path / "out").run()
    before = (tmp_path / "out" / "checkpoint.safetensors").read_bytes()
    other = replace(CONFIG, learning_rate=9.0)
    trainer(target, Trainer, tmp_path / "data", tmp_path / "out", other).run()
    assert (tmp_path / "out" / "checkpoint.safetensors").read_bytes() == before


def test_a_training_may_go_on_on_another_device(target, tmp_path):
    """From a pretended one on the CPU, and back, to the weights of the CPU alone."""
    write_data(tmp_path / "data")
    config = replace(CONFIG, dtype="bfloat16")
    there = replace(target, device=torch.device("cuda", 0))
    trainer(target, Trainer, tmp_path / "data", tmp_path / "whole", config).run()
    with pretended(there.device), pytest.raises(KilledError):
        trainer(there, KilledTrainer, tmp_path / "data", tmp_path / "moved", config).run()
    with pytest.raises(KilledError):
        trainer(target, KilledTrainer, tmp_path / "data", tmp_path / "moved", config).run()
    with pretended(there.device) as operations:
        trainer(there, Trainer, tmp_path / "data", tmp_path / "moved", config).run()
    assert operations.count > 1000
    whole, moved = (
        load_file(tmp_path / out / "checkpoint.safetensors") for out in ("whole", "moved")
    )
    assert all(torch.equal(whole[name], moved[name]) for name in whole)


def test_resuming_without_the_optimizer_state_is_caught(target, tmp_path):
    """Control: the comparison above sees a resume that forgets the moments."""
    write_data(tmp_path / "data")
    trainer(target, Trainer, tmp_path / "data", tmp_path / "whole").run()
    with pytest.raises(KilledError):
        trainer(target, KilledTrainer, tmp_path / "data", tmp_path / "killed").run()
    forgetful = trainer(target, Trainer, tmp_path / "data", tmp_path / "killed")
    restore = forgetful._restore

    def forget():
        found = restore()
        [optimizer.state.clear() for optimizer in forgetful.optimizers]
        return found

    forgetful._restore = forget
    forgetful.run()
    whole = read_average(tmp_path / "whole")
    resumed = read_average(tmp_path / "killed")
    assert any(not torch.equal(whole[name], resumed[name]) for name in whole)


def test_training_lowers_the_loss(target, tmp_path):
    write_data(tmp_path / "data")
    config = replace(CONFIG, max_steps=150, learning_rate=1e-2, average_decay=0.5)
    run = trainer(target, Trainer, tmp_path / "data", tmp_path / "out", config)
    first, last = [], []
    original = run._train_step

    def recorded():
        losses, rows = original()
        (first if run.step <= 10 else last).append(losses[0])
        return losses, rows

    run._train_step = recorded
    run.run()
    assert sum(last[-10:]) / 10 < 0.8 * sum(first) / len(first)


def test_bfloat16_products_train_float32_weights(target, tmp_path):
    """A step of 1e-6 is below bfloat16's spacing: the weights could not move in it."""
    write_data(tmp_path / "data")
    config = replace(
        CONFIG, dtype="bfloat16", learning_rate=1e-6, norm_rate_factor=1, muon_rate=0, max_steps=3
    )
    run = trainer(target, Trainer, tmp_path / "data", tmp_path / "out", config)
    before = {name: value.detach().clone() for name, value in run.layer.named_parameters()}
    run.run()
    assert {value.dtype for value in run.worker.parameters()} == {torch.bfloat16}
    for name, value in run.layer.named_parameters():
        assert value.dtype == torch.float32
        assert not torch.equal(value, before[name]), name
        still = value.bfloat16() == before[name].bfloat16()
        assert value.dim() < 2 or still.float().mean() > 0.9, name
    read = load_file(tmp_path / "out" / "checkpoint.safetensors")
    assert torch.equal(read["layer.projection.weight"], run.layer.projection.weight)


def test_bfloat16_takes_the_steps_of_float32(target, tmp_path):
    """The same batches move the weights nearly the same way; control: other batches do not."""
    write_data(tmp_path / "data")
    moved = {}
    for name, changes in (
        ("float32", {}),
        ("bfloat16", {"dtype": "bfloat16"}),
        ("other batches", {"seed": 1}),
    ):
        config = replace(CONFIG, muon_rate=0, max_steps=1, warmup_steps=1, **changes)
        run = trainer(target, Trainer, tmp_path / "data", tmp_path / name, config)
        before = run.layer.projection.weight.detach().clone()
        run.run()
        moved[name] = (run.layer.projection.weight.detach() - before).flatten()
    like = {name: torch.cosine_similarity(moved["float32"], moved[name], 0) for name in moved}
    assert like["bfloat16"] > 0.9 > 0.7 > like["other batches"]


def test_an_empty_data_folder_is_refused_in_one_sentence(target, tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no shard: run `generate` first"):
        trainer(target, Trainer, tmp_path / "data", tmp_path / "out").run()


def test_no_step_is_taken_on_texts_too_short_to_draft_from(tiny_target, tmp_path, monkeypatch):
    """They fill batches of their own, whose loss, the mean of no row, is the control's NaN."""
    target = tiny_target("MiMoForCausalLM")
    write_data(tmp_path / "data")
    write_short(tmp_path / "data" / "text-00000.safetensors", 3, 300)
    run = trainer(target, Trainer, tmp_path / "data", tmp_path / "out")
    run.run()

    def losses(out):
        return [loss for line in read_log(out / "log.jsonl") for loss in line["losses"]]

    assert len(losses(tmp_path / "out")) == 2 * CONFIG.max_steps
    assert all(map(math.isfinite, losses(tmp_path / "out")))
    long = {i for i, one in enumerate(run.sequences) if len(one.tokens) > 3}
    assert len(long) == 12 and long <= {index for batch in run.batches for index in batch}

    def every_batch(sequences, size, seed, min_position):
        return data.pass_order([len(one.tokens) for one in sequences], size, seed)

    monkeypatch.setattr(training, "drafted_batches", every_batch)
    trainer(target, Trainer, tmp_path / "data", tmp_path / "control").run()
    assert any(map(math.isnan, losses(tmp_path / "control")))


def test_data_without_anything_to_draft_is_refused(tiny_target, tmp_path):
    (tmp_path / "data").mkdir()
    write_short(tmp_path / "data" / "text-00000.safetensors", 3, 5)
    target = tiny_target("MiMoForCausalLM")
    with pytest.raises(ValueError, match="no conversation or text has a token to train on behind"):
        trainer(target, Trainer, tmp_path / "data", tmp_path / "out").run()


def test_a_checkpoint_of_another_optimizer_or_model_is_refused(tiny_target, tmp_path):
    write_data(tmp_path / "data")
    target, out = tiny_target("MiMoForCausalLM"), tmp_path / "out"
    trainer(target, Trainer, tmp_path / "data", out).run()
    longer = replace(CONFIG, max_steps=12)
    other = replace(longer, muon_rate=0.0)
    with pytest.raises(ValueError, match=r"--muon-rate is 0\.0 and was 0\.02 when .*another --out"):
        trainer(target, Trainer, tmp_path / "data", out, other).run()
    deepseek = tiny_target("DeepseekV3ForCausalLM")
    with pytest.raises(ValueError, match="is of a layer of another model: name another --out"):
        trainer(deepseek, Trainer, tmp_path / "data", out, longer).run()
    trainer(target, Trainer, tmp_path / "data", out, longer).run()


@pytest.mark.parametrize(
    ("share", "rates"),
    [(0.0, [0.5, 1, 1, 1]), (0.5, [0.5, 1, 1, 0.5]), (1.0, [0.5, 0.75, 0.5, 0.25])],
)
def test_rates_rise_and_fall_over_the_last_share_of_the_steps(share, rates, tiny_target, tmp_path):
    write_data(tmp_path / "data")
    config = replace(CONFIG, max_steps=4, warmup_steps=2, decay_share=share)
    target = tiny_target("MiMoForCausalLM")
    trained = trainer(target, Trainer, tmp_path / "data", tmp_path / "out", config)
    found = []
    with patch.object(Muon, "step", lambda self: found.append(self.param_groups[0]["lr"])):
        trained.run()
    assert found == [config.muon_rate * rate for rate in rates]
