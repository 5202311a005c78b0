"""Invariant: a training killed after a checkpoint and run again ends in the identical weights."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ascend.training.conversation import FORCED, REPLY
from sglang_ascend.training.export import PREFIX, checkpoint_tensors, export, layer_weights
from sglang_ascend.training.loss import LossConfig
from sglang_ascend.training.mtp_mimo import MiMoConfig, MiMoMTP
from sglang_ascend.training.trainer import TrainConfig, Trainer, read_average

VOCABULARY, SIZE = 11, 8
CONFIG = TrainConfig(
    max_steps=9, tokens_per_batch=48, warmup_steps=2, loss_vocabulary=6, checkpoint_steps=4
)


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


def trainer(kind, data, out, config=CONFIG):
    generator = torch.Generator().manual_seed(5)
    layer = MiMoMTP(MiMoConfig(SIZE, 12, 2, 1))
    layer.initialize(torch.ones(SIZE), 0.3, generator)
    embedding = torch.randn(VOCABULARY, SIZE, generator=generator)
    loss = LossConfig(num_steps=2, hard_weight=0.5)
    return kind(layer, embedding, embedding, data, out, config, loss)


def test_resuming_after_a_kill_gives_identical_weights(tmp_path):
    write_data(tmp_path / "data")
    trainer(Trainer, tmp_path / "data", tmp_path / "whole").run()
    with pytest.raises(KilledError):
        trainer(KilledTrainer, tmp_path / "data", tmp_path / "killed").run()
    trainer(Trainer, tmp_path / "data", tmp_path / "killed").run()
    whole = load_file(tmp_path / "whole" / "checkpoint.safetensors")
    resumed = load_file(tmp_path / "killed" / "checkpoint.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_resuming_without_the_optimizer_state_is_caught(tmp_path):
    """Control: the comparison above sees a resume that forgets the moments."""
    write_data(tmp_path / "data")
    trainer(Trainer, tmp_path / "data", tmp_path / "whole").run()
    with pytest.raises(KilledError):
        trainer(KilledTrainer, tmp_path / "data", tmp_path / "killed").run()
    forgetful = trainer(Trainer, tmp_path / "data", tmp_path / "killed")
    restore = forgetful._restore

    def forget():
        found = restore()
        [optimizer.state.clear() for optimizer in forgetful.optimizers]
        return found

    forgetful._restore = forget
    forgetful.run()
    whole = read_average(tmp_path / "whole" / "checkpoint.safetensors")
    resumed = read_average(tmp_path / "killed" / "checkpoint.safetensors")
    assert any(not torch.equal(whole[name], resumed[name]) for name in whole)


def test_training_lowers_the_loss(tmp_path):
    write_data(tmp_path / "data")
    config = replace(CONFIG, max_steps=150, learning_rate=1e-2, average_decay=0.5)
    run = trainer(Trainer, tmp_path / "data", tmp_path / "out", config)
    first, last = [], []
    original = run._train_step

    def recorded():
        losses, rows = original()
        (first if run.step <= 10 else last).append(losses[0])
        return losses, rows

    run._train_step = recorded
    run.run()
    assert sum(last[-10:]) / 10 < 0.8 * sum(first) / len(first)


def test_an_empty_data_folder_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no shard: run `generate` first"):
        trainer(Trainer, tmp_path / "data", tmp_path / "out").run()


def test_exported_names_are_those_sglang_reads_and_load_back(tmp_path):
    layer = MiMoMTP(MiMoConfig(SIZE, 12, 2, 1))
    weights = {name: value.detach() for name, value in layer.named_parameters()}
    export(weights, tmp_path / "mtp.safetensors")
    tensors = load_file(tmp_path / "mtp.safetensors")
    parts = {name.removeprefix(PREFIX) for name in tensors}
    assert all(name.startswith("model.mtp_layers.0.") for name in tensors)
    assert parts == {
        *(f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")),
        "self_attn.o_proj.weight",
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "final_layernorm.weight",
    }
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert all((tensors[name] == 0).all() for name in tensors if name.endswith(".bias"))
    MiMoMTP(MiMoConfig(SIZE, 12, 2, 1)).load_state_dict(layer_weights(tensors))


def test_weights_that_are_not_finite_are_not_exported():
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        checkpoint_tensors({"input_proj.weight": torch.tensor([[float("nan")]])})
