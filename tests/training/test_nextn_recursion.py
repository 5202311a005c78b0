"""A DeepSeek layer trains on exactly what serving computes: names, inputs, keys of each step.

The oracle drafts one chain at a time with transformers' own decoder layer, as a server does.
"""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
)

from sglang_ascend.models.nano_deepseek import ARTIFACT
from sglang_ascend.training.interface import run_chain
from sglang_ascend.training.targets import layer as layers
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import own_layer

NUM_STEPS, LENGTH = 3, 12
TOLERANCE = 1e-4

# SGLang 0.5.23, models/deepseek_common/deepseek_weight_loader.py: the first four lose the prefix
# `model.layers.<n>`, everything else below it becomes `model.decoder.*`.
SPEC_WEIGHTS = ("shared_head.norm", "eh_proj", "enorm", "hnorm")
# Names of a DeepseekV2DecoderLayer's checkpoint weights, as that loader maps them.
DECODER_WEIGHTS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_a_proj",
    "self_attn.q_a_layernorm",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
    "mlp.gate",
    *(f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")),
    *(f"mlp.experts.{e}.{p}_proj" for e in range(8) for p in ("gate", "up", "down")),
)


def test_checkpoint_names_are_those_that_sglang_reads() -> None:
    config = json.loads((ARTIFACT / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    with safe_open(ARTIFACT / "model.safetensors", "pt") as file:
        names = {n.removeprefix(prefix) for n in file.keys() if n.startswith(prefix)}  # noqa: SIM118
    wanted = {f"{name}.weight" for name in SPEC_WEIGHTS + DECODER_WEIGHTS}
    assert names == wanted | {"mlp.gate.e_score_correction_bias"}


def test_a_layer_that_is_read_and_written_is_the_same_bit_for_bit() -> None:
    target = Target.open(ARTIFACT)
    written = own_layer(target).to_checkpoint()
    with safe_open(ARTIFACT / "model.safetensors", "pt") as file:
        for name in target.mtp_tensors():
            tensor = file.get_tensor(name)
            assert written[name].dtype == tensor.dtype, name
            assert torch.equal(written.pop(name), tensor), name
    assert not written


@pytest.fixture(scope="module")
def oracle_layer() -> tuple[DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding]:
    """The NextN block as transformers' layer, filled from the checkpoint's names."""
    config = DeepseekV3ForCausalLM.config_class.from_pretrained(ARTIFACT)
    config._attn_implementation = "eager"
    prefix = f"model.layers.{config.num_hidden_layers}."
    layer = DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers).float().eval()
    with safe_open(ARTIFACT / "model.safetensors", "pt") as file:
        state = {
            name.removeprefix(prefix): file.get_tensor(name).float()
            for name in file.keys()  # noqa: SIM118
            if name.startswith(prefix) and not any(s in name for s in SPEC_WEIGHTS)
        }
    experts = range(config.n_routed_experts)
    for projection in ("gate", "up", "down"):
        stack = [state.pop(f"mlp.experts.{e}.{projection}_proj.weight") for e in experts]
        state[projection] = torch.stack(stack)
    gate_up = torch.cat([state.pop("gate"), state.pop("up")], 1)
    state |= {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": state.pop("down")}
    layer.load_state_dict(state)
    return layer, DeepseekV3RotaryEmbedding(config)


def served_chain(oracle_layer, nextn, hidden, embedded, slot: int) -> list[torch.Tensor]:
    """Outputs of one chain: its rows follow the step-1 rows of slots 0..slot."""
    block, rotary = oracle_layer

    def pair(index: int, state: torch.Tensor) -> torch.Tensor:
        # DeepSeek-V3 report, equation 21; SGLang concatenates embedding first.
        parts = nextn.token_norm(embedded[index + 1]), nextn.hidden_norm(state)
        return nextn.projection(torch.cat(parts))

    rows = [pair(index, hidden[index]) for index in range(slot + 1)]
    outputs = []
    for step in range(NUM_STEPS):
        x = torch.stack(rows)[None]
        positions = torch.arange(len(rows))[None]
        mask = torch.full((1, 1, len(rows), len(rows)), -torch.inf).triu(1)
        out = block(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary(x, positions),
        )
        out = out[0] if isinstance(out, tuple) else out
        outputs.append(nextn.final_norm(out[0, -1]))
        if step < NUM_STEPS - 1:
            rows.append(pair(slot + step + 1, outputs[-1]))
    return outputs


def largest_difference(oracle_layer) -> float:
    target = Target.open(ARTIFACT)
    oracle = DeepseekV3ForCausalLM.from_pretrained(ARTIFACT, dtype=torch.float32).eval()
    nextn, table = own_layer(target), target.embedding_and_head()[0]
    ids = torch.randint(6, 4096, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    worst = 0.0
    with torch.inference_mode():
        hidden = oracle.model(ids).last_hidden_state
        trained = run_chain(nextn, hidden, ids, table, NUM_STEPS)
        for row in range(len(ids)):
            for slot in range(LENGTH - NUM_STEPS):
                served = served_chain(oracle_layer, nextn, hidden[row], table[ids[row]], slot)
                for step, output in enumerate(served):
                    difference = (trained[step][row, slot] - output).abs().max().item()
                    worst = max(worst, difference)
    return worst


def test_the_parallel_recursion_equals_chains_drafted_one_by_one(oracle_layer) -> None:
    assert largest_difference(oracle_layer) < TOLERANCE


def test_a_recursion_that_sees_the_wrong_keys_is_noticed(
    oracle_layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def causal_in_every_step(num_slots: int, step: int, device: object = "cpu") -> torch.Tensor:
        return torch.ones(num_slots, num_slots, dtype=torch.bool).tril().repeat(1, step)

    monkeypatch.setattr(layers, "chain_mask", causal_in_every_step)
    assert largest_difference(oracle_layer) > 100 * TOLERANCE
