"""Invariant: a Llama and the checkpoint that is exported of it compute the same."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_targets import write_target

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.training.export import export
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TOKENS = torch.arange(40)[None] % 10


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """With all that a Llama may have beside the plainest one: scaled rotation, wide heads."""
    folder = tmp_path_factory.mktemp("llama")
    return write_target(
        folder, "LlamaForCausalLM", head_dim=8, rope_parameters=LLAMA3_ROPE, rope_theta=500.0
    )


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(TOKENS).logits


def of_llama(folder: Path) -> torch.Tensor:
    return logits(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


def of_qwen2(folder: Path) -> torch.Tensor:
    return logits(transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def exported(llama, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    target = Target.open(llama)
    target.check_whole()
    export(target, new_layer(target, seed=0), out)
    return out


def test_the_exported_checkpoint_computes_what_the_llama_computes(llama, exported):
    summary = validate_checkpoint(exported)
    assert summary is not None
    assert summary.architecture == "MiMoForCausalLM"
    assert (of_qwen2(exported) - of_llama(llama)).abs().max() < 1e-5


def test_a_bias_or_another_rotation_would_be_seen(llama, exported, tmp_path):
    """Controls of the comparison above."""
    for name in ("bias", "rotation"):
        folder = tmp_path / name
        folder.mkdir()
        for path in exported.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(exported / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"] += torch.linspace(-1, 1, 16).bfloat16()
    tensors["model.layers.1.self_attn.v_proj.bias"] += 0.1
    save_file(tensors, tmp_path / "bias" / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path / "rotation", rope_parameters={"rope_type": "default", "rope_theta": 9.0})
    for name in ("bias", "rotation"):
        assert (of_qwen2(tmp_path / name) - of_llama(llama)).abs().max() > 1e-2


def test_training_reads_the_llama_itself(llama):
    """Its attention takes the mask of the caller: here every earlier position."""
    model = Target.open(llama).load_model()
    length = TOKENS.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        found = model(TOKENS, attention_mask=mask).logits
    assert (found - of_llama(llama)).abs().max() < 1e-5


def test_what_an_older_config_leaves_out_has_llamas_meaning(tmp_path):
    folder = write_target(tmp_path / "old", "LlamaForCausalLM", num_key_value_heads=6)
    fields = json.loads((folder / "config.json").read_text())
    for name in ("num_key_value_heads", "max_position_embeddings", "head_dim", "rope_parameters"):
        fields.pop(name, None)
    (folder / "config.json").write_text(json.dumps(fields))
    target = Target.open(folder)
    export(target, new_layer(target, seed=0), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["num_key_value_heads"], written["max_position_embeddings"]) == (6, 2048)
    assert (of_qwen2(tmp_path / "out") - of_llama(folder)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention_bias": True}, "attention_bias = true, which no MTP family of SGLang has"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_a_llama_that_qwen2_cannot_be_is_refused(tmp_path, changes, sentence):
    folder = write_target(tmp_path / "target", "LlamaForCausalLM")
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        Target.open(folder)


@pytest.mark.parametrize("gone", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_target_that_lacks_a_tensor_is_refused_before_it_is_used(tmp_path, gone):
    folder = write_target(tmp_path / "target", "LlamaForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"first {gone}, .*download the complete checkpoint"):
        Target.open(folder).check_whole()


def test_a_target_without_tokenizer_is_refused(tmp_path):
    folder = write_target(tmp_path / "target", "LlamaForCausalLM")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*copy the one that"):
        Target.open(folder).check_whole()


def test_a_llama_is_quantized_as_what_it_is_served_as(llama):
    with pytest.raises(CheckpointError, match="quantize the checkpoint that `sglang-ascend train"):
        Layers(Target.open(llama), Weights(llama))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window in config.json"),
        ({"model_type": "mimo", "auto_map": {"AutoConfig": "x.y"}}, "delete auto_map"),
    ],
)
def test_what_could_not_be_served_is_refused_before_it_is_trained(tmp_path, change, said):
    folder = write_target(tmp_path / "target", "Qwen2ForCausalLM")
    Target.open(folder).check_whole()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=said):
        Target.open(folder).check_whole()
