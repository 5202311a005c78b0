"""Invariant: a whole checkpoint passes, and one defect in it is refused in one sentence that names
the file or flag at fault and the remedy. Every row of CASES changes one thing of a passing control.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from defects import (
    BODY_SHARD,
    INDEX,
    MTP_SHARD,
    Mutation,
    config_with,
    config_without,
    first,
    narrower,
    only_pickles,
    shard_is_a_pipe,
    shorter,
    tensor_held_twice,
    tensor_in_two_shards,
    with_bytes,
    with_header,
    with_index,
    with_tensor,
    with_value,
    without_file,
    without_tensors,
)

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint

FAMILIES = ("mimo", "deepseek", "glm4_moe", "ernie", "hunyuan", "qwen3_moe")
MIMO = "model.mtp_layers.0"
NEXTN = "model.layers.2"

# name: (family, mutation, words of the sentence: the file or flag, the fault, the remedy)
CASES: dict[str, tuple[str, Mutation, tuple[str, ...]]] = {
    # config.json
    "no config": (
        "mimo",
        without_file("config.json"),
        ("config.json is missing", "pass the folder"),
    ),
    "config is no JSON": (
        "mimo",
        with_bytes("config.json", lambda content: content[:-1]),
        ("config.json", "not valid JSON", "correct it"),
    ),
    "config is a list": (
        "mimo",
        with_bytes("config.json", lambda content: b"[]"),
        ("config.json", "not hold a JSON object", "correct it"),
    ),
    "config nests without end": (
        "mimo",
        with_bytes("config.json", lambda content: b"[" * 200_000),
        ("config.json", "not valid JSON", "correct it"),
    ),
    "no architecture": (
        "mimo",
        config_with(architectures=[]),
        ("config.json", "architectures", "download it again"),
    ),
    "architecture without an MTP layer": (
        "mimo",
        config_with(architectures=["LlamaForCausalLM"]),
        ("--model-path", "LlamaForCausalLM", "pass a checkpoint with an MTP layer"),
    ),
    "an MTP layer that is not served": (
        "mimo",
        config_with(architectures=["Qwen3NextForCausalLM"], full_attention_interval=4),
        ("--model-path", "full_attention_interval", "leave out --speculative-algorithm"),
    ),
    "an MTP layer whose tensors are not known": (
        "mimo",
        config_with(architectures=["BailingMoeV2ForCausalLM"]),
        ("--model-path", "needs the names and shapes", "leave out --speculative-algorithm"),
    ),
    "MTP layer alone as the model": (
        "mimo",
        config_with(architectures=["MiMoMTP"]),
        ("--model-path", "MiMoMTP", "pass the model as --model-path"),
    ),
    "remote code": (
        "mimo",
        config_with(model_type="mimo", auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"}),
        ("config.json", "auto_map", "remote code", 'set "model_type": "qwen2"'),
    ),
    "model type that transformers does not know": (
        "mimo",
        config_with(model_type="mimo"),
        ("config.json", "model_type mimo", 'set "model_type": "qwen2"'),
    ),
    "no MTP layer declared": (
        "mimo",
        config_without("num_nextn_predict_layers"),
        ("config.json", "num_nextn_predict_layers", 'set "num_nextn_predict_layers": 1'),
    ),
    "no MTP layer declared and none held": (
        "deepseek",
        lambda c: (config_with(num_nextn_predict_layers=0)(c), without_tensors(NEXTN)(c)),
        ("config.json", "num_nextn_predict_layers", "pass a checkpoint with a complete MTP layer"),
    ),
    "two MTP layers": (
        "deepseek",
        config_with(num_nextn_predict_layers=2),
        ("config.json", "2 MTP layers", 'set "num_nextn_predict_layers": 1'),
    ),
    "no hidden size": (
        "mimo",
        config_without("hidden_size"),
        ("config.json", "lacks hidden_size", "add the value"),
    ),
    "hidden size is a word": (
        "mimo",
        config_with(hidden_size="24"),
        ("config.json", "hidden_size = 24", "set it to the integer"),
    ),
    "no attention heads": (
        "mimo",
        config_with(num_attention_heads=0),
        ("config.json", "num_attention_heads = 0", "set it to the integer"),
    ),
    "absurd number of layers": (
        "mimo",
        config_with(num_hidden_layers=10**9),
        ("config.json", "num_hidden_layers", "set it to the number of layers"),
    ),
    "no q_lora_rank": (
        "deepseek",
        config_without("q_lora_rank"),
        ("config.json", "lacks q_lora_rank", "add the value"),
    ),
    "no topk_method": (
        "deepseek",
        config_without("topk_method"),
        ("config.json", "lacks topk_method", "add the value"),
    ),
    "biases that SGLang has not": (
        "ernie",
        config_with(use_bias=True),
        ("config.json", "use_bias = true", "pass a checkpoint without them"),
    ),
    "no moe_layer_end_index": (
        "ernie",
        config_without("moe_layer_end_index"),
        ("config.json", "lacks moe_layer_end_index", "add the value"),
    ),
    "no route_norm": (
        "hunyuan",
        config_without("route_norm"),
        ("config.json", "lacks route_norm", "add the value"),
    ),
    "norms of q and k not declared": (
        "hunyuan",
        config_without("qk_norm"),
        ("config.json", "lacks qk_norm", "add the value"),
    ),
    # files
    "no tokenizer": (
        "mimo",
        without_file("tokenizer.json"),
        ("has no tokenizer", "--tokenizer-path", "--skip-tokenizer-init"),
    ),
    "tokenizer is no JSON": (
        "mimo",
        with_bytes("tokenizer.json", lambda content: b"{"),
        ("tokenizer.json", "not valid JSON", "correct it"),
    ),
    "pickles only": (
        "mimo",
        only_pickles,
        ("pytorch_model.bin", "pickles", "convert them to safetensors"),
    ),
    "no weights": (
        "mimo",
        without_file(BODY_SHARD, MTP_SHARD, INDEX),
        ("no .safetensors file", "pass the folder of a complete checkpoint"),
    ),
    "shard missing": (
        "mimo",
        without_file(MTP_SHARD),
        (MTP_SHARD, "is missing", "download it again"),
    ),
    "shard is a pipe": ("mimo", shard_is_a_pipe, (MTP_SHARD, "not a regular file", "replace it")),
    "tensor held twice": (
        "mimo",
        tensor_held_twice,
        (MTP_SHARD, "old.safetensors", "move one of them away"),
    ),
    "tensor in two shards that the index names": (
        "mimo",
        tensor_in_two_shards,
        (MTP_SHARD, "both hold", "download both files again"),
    ),
    "index is no JSON": (
        "mimo",
        with_bytes(INDEX, lambda content: content[:-2]),
        (INDEX, "not valid JSON", "download it again"),
    ),
    "index without a map": (
        "mimo",
        with_bytes(INDEX, lambda content: b"{}"),
        (INDEX, "weight_map", "download it again"),
    ),
    "index leaves the folder": (
        "mimo",
        with_index(lambda shards: shards.update({"model.norm.weight": "../other.safetensors"})),
        (INDEX, "../other.safetensors", "correct the index"),
    ),
    "index names an absolute path": (
        "mimo",
        with_index(lambda shards: shards.update({"model.norm.weight": "/etc/a.safetensors"})),
        (INDEX, "/etc/a.safetensors", "correct the index"),
    ),
    "index names a pickle": (
        "mimo",
        with_index(lambda shards: shards.update({"model.norm.weight": "model.bin"})),
        (INDEX, "model.bin", "correct the index"),
    ),
    "index promises an absent tensor": (
        "mimo",
        with_index(lambda shards: shards.update({"model.extra.weight": MTP_SHARD})),
        (MTP_SHARD, "model.extra.weight", "download both files again"),
    ),
    # headers
    "empty shard": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: b""),
        (MTP_SHARD, "truncated", "download it again"),
    ),
    "data cut short": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: content[:-1]),
        (MTP_SHARD, "truncated", "download it again"),
    ),
    "header cut short": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: content[:100]),
        (MTP_SHARD, "truncated", "download it again"),
    ),
    "bytes after the data": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: content + b"\0"),
        (MTP_SHARD, "corrupt", "download it again"),
    ),
    "header longer than allowed": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: struct.pack("<Q", 100_000_001) + content[8:]),
        (MTP_SHARD, "corrupt", "100000000 bytes", "download it again"),
    ),
    "header is no JSON": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: content[:8] + b"!" + content[9:]),
        (MTP_SHARD, "corrupt", "not valid JSON", "download it again"),
    ),
    "header is no UTF-8": (
        "mimo",
        with_bytes(MTP_SHARD, lambda content: content[:10] + b"\xff" + content[11:]),
        (MTP_SHARD, "corrupt", "not valid JSON", "download it again"),
    ),
    "unknown dtype": (
        "mimo",
        with_header(lambda header: first(header).update(dtype="BF17")),
        (MTP_SHARD, "unknown dtype BF17", "download it again"),
    ),
    "shape and bytes disagree": (
        "mimo",
        with_header(lambda header: first(header).update(dtype="F32")),
        (MTP_SHARD, "does not fill its data_offsets", "download it again"),
    ),
    "negative size": (
        "mimo",
        with_header(lambda header: first(header).update(shape=[-1, -24])),
        (MTP_SHARD, "malformed shape", "download it again"),
    ),
    "overlapping tensors": (
        "mimo",
        with_header(lambda header: header.update({f"{MIMO}.again": first(header)})),
        (MTP_SHARD, "overlaps", "download it again"),
    ),
    "gap between tensors": (
        "mimo",
        with_header(lambda header: header.pop(f"{MIMO}.mlp.up_proj.weight")),
        (MTP_SHARD, "gap", "download it again"),
    ),
    "header record without offsets": (
        "mimo",
        with_header(lambda header: first(header).pop("data_offsets")),
        (MTP_SHARD, "lacks dtype, shape or data_offsets", "download it again"),
    ),
    # tensors of the MTP layer
    "MTP layer missing (MiMo)": (
        "mimo",
        without_tensors(MIMO),
        (
            "--model-path",
            "lacks 16 of the 16",
            f"{MIMO}.input_proj.weight",
            "pass a checkpoint with",
        ),
    ),
    "MTP layer missing (NextN)": (
        "deepseek",
        without_tensors(NEXTN),
        ("--model-path", "lacks 24 of the 24", f"{NEXTN}.eh_proj.weight", "pass a checkpoint with"),
    ),
    "one MTP tensor missing": (
        "mimo",
        without_tensors(f"{MIMO}.mlp.down_proj"),
        ("--model-path", "lacks 1 of the 16", f"{MIMO}.mlp.down_proj.weight", "pass a checkpoint"),
    ),
    "MTP bias missing": (
        "mimo",
        without_tensors(f"{MIMO}.self_attn.k_proj.bias"),
        ("lacks 1 of the 16", f"{MIMO}.self_attn.k_proj.bias", "pass a checkpoint"),
    ),
    "one MTP expert missing": (
        "deepseek",
        without_tensors(f"{NEXTN}.mlp.experts.1"),
        ("lacks 3 of the 24", f"{NEXTN}.mlp.experts.1.gate_proj.weight", "pass a checkpoint"),
    ),
    "packed weights without a quantization_config": (
        "mimo",
        with_tensor(f"{MIMO}.mlp.up_proj.weight", lambda tensor: tensor.to(torch.int8)),
        (MTP_SHARD, f"{MIMO}.mlp.up_proj.weight", "I8", "export the weights as BF16"),
    ),
    # tensors of the target
    "target tensor missing": (
        "deepseek",
        without_tensors("model.layers.1.mlp.gate.weight"),
        ("--model-path", "model.layers.1.mlp.gate.weight", "download the complete checkpoint"),
    ),
    "head missing": (
        "deepseek",
        without_tensors("lm_head"),
        ("--model-path", "lm_head.weight", "download the complete checkpoint"),
    ),
    "vocabulary too large": (
        "mimo",
        config_with(vocab_size=51),
        (BODY_SHARD, "embed_tokens", "[50, 24]", "[51, 24]", "use the config.json and the weights"),
    ),
    # values
    "NaN in the MTP layer": (
        "mimo",
        with_value(f"{MIMO}.self_attn.o_proj.weight", float("nan")),
        (MTP_SHARD, f"{MIMO}.self_attn.o_proj.weight", "NaN", "export it again"),
    ),
    "infinity in the MTP layer": (
        "deepseek",
        with_value(f"{NEXTN}.mlp.experts.1.down_proj.weight", float("-inf")),
        (MTP_SHARD, f"{NEXTN}.mlp.experts.1.down_proj.weight", "infinity", "export it again"),
    ),
    "NaN in the target": (
        "mimo",
        with_value("model.norm.weight", float("nan")),
        (BODY_SHARD, "model.norm.weight", "NaN", "export it again"),
    ),
    "projection of zeros": (
        "mimo",
        with_tensor(f"{MIMO}.input_proj.weight", torch.zeros_like),
        (MTP_SHARD, f"{MIMO}.input_proj.weight", "only zeros", "export the trained MTP layer"),
    ),
    "projection of negative zeros": (
        "deepseek",
        with_tensor(f"{NEXTN}.eh_proj.weight", lambda tensor: torch.zeros_like(tensor).neg()),
        (MTP_SHARD, f"{NEXTN}.eh_proj.weight", "only zeros", "export the trained MTP layer"),
    ),
}


def sentence_of(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    sentence = str(error.value)
    assert sentence.isprintable() and "; " in sentence, sentence
    return sentence


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_checkpoint_passes(build, family: str) -> None:
    checkpoint = build(family)

    summary = validate_checkpoint(checkpoint.folder)

    assert summary is not None
    assert summary.num_tensors == len(checkpoint.tensors)
    assert summary.num_mtp_tensors == len(checkpoint.mtp_names)
    assert summary.num_bytes == 2 * sum(tensor.numel() for tensor in checkpoint.tensors.values())
    assert summary.num_bytes_scanned == summary.num_bytes
    assert summary.mtp_path == checkpoint.folder and not summary.quantized


@pytest.mark.parametrize("name", CASES)
def test_one_defect_is_refused_in_one_sentence(build, name: str) -> None:
    family, mutate, words = CASES[name]
    checkpoint = build(family)
    validate_checkpoint(checkpoint.folder)
    mutate(checkpoint)

    with pytest.raises(CheckpointError) as error:
        validate_checkpoint(checkpoint.folder)

    sentence = sentence_of(error)
    assert [word for word in words if word not in sentence] == [], sentence


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [narrower, shorter])
def test_every_tensor_of_a_wrong_shape_is_refused(build, family: str, change: Callable) -> None:
    checkpoint = build(family)
    for name, tensor in list(checkpoint.tensors.items()):
        checkpoint.tensors[name] = change(tensor).contiguous()
        checkpoint.save()
        with pytest.raises(CheckpointError) as error:
            validate_checkpoint(checkpoint.folder)
        sentence = sentence_of(error)
        assert name in sentence and str(list(tensor.shape)) in sentence
        checkpoint.tensors[name] = tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_that_is_missing_is_refused_by_name(build, family: str) -> None:
    checkpoint = build(family)
    for name, tensor in list(checkpoint.tensors.items()):
        del checkpoint.tensors[name]
        checkpoint.save()
        with pytest.raises(CheckpointError) as error:
            validate_checkpoint(checkpoint.folder)
        assert name in sentence_of(error)
        checkpoint.tensors[name] = tensor
