"""Pretraining can be killed and resumed without a trace, and questions weigh less than answers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes.nano_deepseek import experts, pretrain
from recipes.nano_deepseek.config import NanoConfig
from recipes.nano_deepseek.text.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, USER_ID

STEPS = 3


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random documents for every part, and a model small enough for a few quick steps."""
    rng = np.random.default_rng(0)
    for part in pretrain.MIX:
        for split in ("train", "val"):
            tokens = rng.integers(6, 64, 3000).astype(np.uint16)
            tokens[::100] = BOS_ID
            np.save(tmp_path / f"{part}.{split}.npy", tokens)
    monkeypatch.setattr(pretrain, "NanoConfig", lambda: NanoConfig(vocab_size=64, hidden_size=32))
    monkeypatch.setattr(pretrain, "SAVE_EVERY", 1)
    monkeypatch.setattr(pretrain, "SHORT", pretrain.Shape(2, 32))
    return tmp_path


def weights_after(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "progress.safetensors")


def interrupted_run(corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, fail in the last step, and start again."""
    balance = pretrain.balance_experts
    calls = iter(range(STEPS))

    def fail_at_the_end(model: torch.nn.Module) -> None:
        if next(calls) == STEPS - 1:
            raise KeyboardInterrupt
        balance(model)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pretrain, "balance_experts", fail_at_the_end)
        pretrain.pretrain(corpus, out, STEPS, seed=0)
    pretrain.pretrain(corpus, out, STEPS, seed=0)


def same_weights(first: Path, second: Path) -> bool:
    one, two = weights_after(first), weights_after(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_resumed_run_ends_in_the_same_weights_and_optimizer_state(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain.pretrain(corpus, tmp_path / "whole", STEPS, seed=0)
    interrupted_run(corpus, tmp_path / "resumed", monkeypatch)
    assert same_weights(tmp_path / "whole", tmp_path / "resumed")


def test_a_kill_between_the_weights_and_the_log_skips_no_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, content: object) -> None:
        raise KeyboardInterrupt

    pretrain.pretrain(corpus, tmp_path / "whole", STEPS, seed=0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pretrain, "write_json", killed)
        pretrain.pretrain(corpus, tmp_path / "resumed", STEPS, seed=0)
    pretrain.pretrain(corpus, tmp_path / "resumed", STEPS, seed=0)
    assert same_weights(tmp_path / "whole", tmp_path / "resumed")


def test_forgetting_the_optimizer_state_is_noticed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain.pretrain(corpus, tmp_path / "whole", STEPS, seed=0)
    restore = pretrain.load_progress
    monkeypatch.setattr(pretrain, "load_progress", lambda out, model, _: restore(out, model, ()))
    interrupted_run(corpus, tmp_path / "resumed", monkeypatch)
    assert not same_weights(tmp_path / "whole", tmp_path / "resumed")


def test_only_targets_inside_a_question_are_weighed_down() -> None:
    ids = torch.tensor([[BOS_ID, USER_ID, 7, 8, ASSISTANT_ID, 9, END_ID, USER_ID, 7, 50, 51]])
    low = pretrain.QUESTION_WEIGHT
    wanted = [[low, low, low, 1.0, 1.0, 1.0, low, low, low, low]]
    assert pretrain.loss_weights(ids).tolist() == pytest.approx(np.array(wanted, np.float32))


def test_the_router_bias_moves_rows_from_busy_experts_to_idle_ones() -> None:
    router = experts.Router(NanoConfig())
    router.balance(torch.tensor([8, 0, 2, 2, 2, 2, 0, 0]), rate=0.5)
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0.5, 0.5]
