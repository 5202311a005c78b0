"""The streamed layers with separate experts compute what transformers' whole model computes."""

import torch

from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.training.interface import run_chain
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.quantized import linears
from sglang_ascend.training.targets.start import own_layer


def opened(folder):
    target = Target.open(folder)
    return target, Layers(target, Weights(folder))


def sequences(vocabulary, lengths=(9, 3, 14)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


@torch.inference_mode()
def test_packed_sequences_have_the_hidden_states_of_transformers(with_mtp):
    target, layers = opened(with_mtp)
    tokens = sequences(target.config.size("vocab_size"))
    model = target.load_model()
    found = layers.final_hidden(tokens)
    for row, states in zip(tokens, found, strict=True):
        mask = torch.ones(len(row), len(row), dtype=torch.bool).tril()[None, None]
        expected = model.model(row[None], attention_mask=mask).last_hidden_state[0]
        assert (states - expected).abs().max() < 1e-4
    (joined,) = layers.final_hidden([torch.cat(tokens)])  # the control: one long sequence
    assert (joined[-len(tokens[-1]) :] - found[-1]).abs().max() > 0.01


@torch.inference_mode()
def test_the_mtp_layer_is_that_of_training(with_mtp):
    target, layers = opened(with_mtp)
    (tokens,) = sequences(target.config.size("vocab_size"), (12,))
    hidden = torch.randn(1, 12, target.config.size("hidden_size"))
    embedding = layers.embedding()
    found = run_chain(layers.mtp(), hidden, tokens[None], embedding, 3)
    expected = run_chain(own_layer(target), hidden, tokens[None], embedding, 3)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-5
    names = {name for name, _ in linears(layers.mtp().block)}
    skeleton = {name for name, _ in linears(layers.skeleton(layers.num_layers))}
    assert names == skeleton


def test_one_decoder_layer_is_in_memory_at_a_time(with_mtp, monkeypatch):
    import gc

    target, layers = opened(with_mtp)
    kind = type(layers.skeleton(0))
    alive = []
    build = layers.decoder

    def counted(index):
        gc.collect()
        alive.append(sum(type(held) is kind for held in gc.get_objects()))
        return build(index)

    monkeypatch.setattr(layers, "decoder", counted)
    gc.collect()
    before = sum(type(held) is kind for held in gc.get_objects())
    with torch.inference_mode():
        layers.final_hidden(sequences(target.config.size("vocab_size")))
    assert alive == [before] * layers.num_layers
