"""Invariant: what training computes at step k is what serving's drafting computes at step k.

The oracle drafts as an EAGLE worker does: one token at a time, with a real key-value list.
"""

import pytest
import torch
import torch.nn.functional as F
from tiny_targets import write_target

from sglang_ascend.training.interface import ChainCache, chain_mask, run_chain
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.layer import MTPLayer

LENGTH, STEPS, VOCABULARY = 9, 4, 13


# transformers computes norms and rotary angles in fp32, whatever the weights.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mimo")
    return Target.open(write_target(folder, "MiMoForCausalLM", rms_norm_eps=1e-5))


@pytest.fixture
def setting(target):
    generator = torch.Generator().manual_seed(0)
    layer = MTPLayer(target).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * 0.4)
    embedding = torch.randn(VOCABULARY, 24, generator=generator, dtype=torch.float64)
    hidden = torch.randn(1, LENGTH, 24, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
    return layer, embedding, hidden, tokens


def rms(x, weight):
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def rotate_one(vector, position):
    """Split-half rotary embedding of one head vector, pair by pair."""
    half, out = len(vector) // 2, vector.clone()
    for pair in range(half):
        angle = torch.tensor(position * 10000.0 ** (-pair / half), dtype=torch.float64)
        first, second = vector[pair], vector[pair + half]
        out[pair] = first * angle.cos() - second * angle.sin()
        out[pair + half] = second * angle.cos() + first * angle.sin()
    return out


def draft_one(w, hidden, token_embedding, position, stored):
    """One row through the layer with the list `stored` of (keys, values); appends its own."""
    if position == 0:
        token_embedding = torch.zeros_like(token_embedding)
    pair = torch.cat(
        [
            rms(hidden, w["hidden_layernorm.weight"]),
            rms(token_embedding, w["token_layernorm.weight"]),
        ]
    )
    x = w["input_proj.weight"] @ pair
    normed = rms(x, w["input_layernorm.weight"])
    heads = {
        name: (w[f"self_attn.{name}_proj.weight"] @ normed + w[f"self_attn.{name}_proj.bias"]).view(
            -1, 4
        )
        for name in "qkv"
    }
    query = [rotate_one(head, position) for head in heads["q"]]
    stored.append(([rotate_one(head, position) for head in heads["k"]], list(heads["v"])))
    mixed = []
    for index, head in enumerate(query):
        group = index // 3
        scores = torch.stack([head @ keys[group] / 2.0 for keys, _ in stored])
        values = torch.stack([values[group] for _, values in stored])
        mixed.append(scores.softmax(0) @ values)
    x = x + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
    normed = rms(x, w["post_attention_layernorm.weight"])
    gate = F.silu(w["mlp.gate_proj.weight"] @ normed) * (w["mlp.up_proj.weight"] @ normed)
    return rms(x + w["mlp.down_proj.weight"] @ gate, w["final_layernorm.weight"])


def sequential_drafts(layer, embedding, hidden, tokens):
    """outputs[k][i]: after slots 0..i were extended with target hiddens, draft k steps from i."""
    weights = {layer.checkpoint_name(name): value for name, value in layer.named_parameters()}
    outputs = [[] for _ in range(STEPS)]
    extended = []
    for slot in range(LENGTH - STEPS):
        state = draft_one(weights, hidden[0, slot], embedding[tokens[0, slot + 1]], slot, extended)
        outputs[0].append(state)
        chain = list(extended)  # a chain's own keys are dropped when the next verify begins
        for step in range(1, STEPS):
            token = embedding[tokens[0, slot + 1 + step]]
            state = draft_one(weights, state, token, slot + step, chain)
            outputs[step].append(state)
    return [torch.stack(states) for states in outputs]


def largest_difference(outputs, oracle, step):
    return (outputs[step][0, : LENGTH - STEPS] - oracle[step]).abs().max().item()


@torch.no_grad()
def test_every_step_equals_sequential_drafting_with_a_key_value_list(setting):
    layer, embedding, hidden, tokens = setting
    outputs = run_chain(layer, hidden, tokens, embedding, STEPS)
    oracle = sequential_drafts(layer, embedding, hidden, tokens)
    for step in range(STEPS):
        assert largest_difference(outputs, oracle, step) < TOLERANCE


@torch.no_grad()
def test_a_plain_causal_mask_in_later_steps_is_caught(setting):
    """Control: later steps that see only their own step's keys (FastMTP's own training rule)."""
    layer, embedding, hidden, tokens = setting
    oracle = sequential_drafts(layer, embedding, hidden, tokens)
    state, outputs = hidden[:, : LENGTH - 1], []
    for step in range(2):
        inputs = embedding[F.pad(tokens, (0, 1))[:, 1 + step : LENGTH + step]]
        positions = torch.arange(LENGTH - 1) + step
        state = layer(state, inputs, positions, ChainCache())
        outputs.append(state)
    assert largest_difference(outputs, oracle, 0) < TOLERANCE
    assert largest_difference(outputs, oracle, 1) > 1e-2


@torch.no_grad()
def test_positions_that_do_not_advance_are_caught(setting):
    """Control: rotary positions stay those of step 1."""
    layer, embedding, hidden, tokens = setting
    oracle = sequential_drafts(layer, embedding, hidden, tokens)
    cache, state, outputs = ChainCache(), hidden[:, : LENGTH - 1], []
    for step in range(2):
        inputs = embedding[F.pad(tokens, (0, 1))[:, 1 + step : LENGTH + step]]
        state = layer(state, inputs, torch.arange(LENGTH - 1), cache)
        outputs.append(state)
    assert largest_difference(outputs, oracle, 1) > 1e-3


def test_the_mask_is_causal_in_step_one_and_diagonal_later():
    mask = chain_mask(3, 2)
    assert mask.tolist() == [
        [True, False, False, True, False, False],
        [True, True, False, False, True, False],
        [True, True, True, False, False, True],
    ]


@torch.no_grad()
def test_padding_after_a_sequence_changes_nothing_before_it(setting):
    layer, embedding, hidden, tokens = setting
    padded_hidden = F.pad(hidden, (0, 0, 0, 3), value=5.0)
    padded_tokens = F.pad(tokens, (0, 3), value=1)
    short = run_chain(layer, hidden, tokens, embedding, 2)
    long = run_chain(layer, padded_hidden, padded_tokens, embedding, 2)
    assert torch.allclose(short[0], long[0][:, : LENGTH - 1], atol=1e-12)
    assert torch.allclose(short[1][:, :-1], long[1][:, : LENGTH - 2], atol=1e-12)
