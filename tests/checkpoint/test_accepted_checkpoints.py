"""Invariant: what SGLang can serve is not refused: one file or many, links as in the Hugging Face
cache, a separate draft folder, quantized and fused tensors, and the user's own tokenizer flags.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_ascend.checkpoint import CheckpointError, validate_checkpoint

BODY_SHARD = "model-00001-of-00002.safetensors"
MTP_SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NEXTN = "model.layers.2"


def test_shards_without_an_index_are_all_read(build) -> None:
    checkpoint = build("mimo")
    (checkpoint.folder / INDEX).unlink()
    assert validate_checkpoint(checkpoint.folder).num_tensors == len(checkpoint.tensors)


def test_shards_outside_the_index_are_not_read(build) -> None:
    checkpoint = build("mimo")
    (checkpoint.folder / "stale.safetensors").write_bytes(b"not a safetensors file")
    assert validate_checkpoint(checkpoint.folder).num_tensors == len(checkpoint.tensors)


def test_links_into_a_blob_store_are_followed(build, tmp_path: Path) -> None:
    checkpoint = build("mimo")
    blob = tmp_path / "blobs" / "0123abcd"
    blob.parent.mkdir()
    (checkpoint.folder / MTP_SHARD).rename(blob)
    (checkpoint.folder / MTP_SHARD).symlink_to(Path("..") / "blobs" / "0123abcd")
    assert validate_checkpoint(checkpoint.folder).num_mtp_tensors == len(checkpoint.mtp_names)


def test_mtp_layer_may_come_from_a_draft_folder(build) -> None:
    target, draft = build("mimo", "target"), build("mimo", "draft")
    for name in target.mtp_names:
        del target.tensors[name]
    target.config.update(architectures=["Qwen2ForCausalLM"], num_nextn_predict_layers=None)
    target.save()
    draft.config["architectures"] = ["MiMoMTP"]
    draft.save()

    summary = validate_checkpoint(target.folder, draft.folder)

    assert summary.mtp_path == draft.folder
    assert summary.num_mtp_tensors == len(draft.mtp_names)
    with pytest.raises(CheckpointError):
        validate_checkpoint(target.folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle"]},
            ("LlamaForCausalLMEagle", "algorithm EAGLE"),
        ),
        ({"vocab_size": 51}, ("vocab_size 51", "pass an MTP layer of the same model")),
        ({"num_nextn_predict_layers": 0}, ("num_nextn_predict_layers", "set ")),
    ],
)
def test_draft_folder_that_does_not_fit_is_refused(build, change: dict, words: tuple) -> None:
    target, draft = build("mimo", "target"), build("mimo", "draft")
    assert validate_checkpoint(target.folder, draft.folder).mtp_path == draft.folder
    draft.config.update(change)
    draft.save()
    with pytest.raises(CheckpointError) as error:
        validate_checkpoint(target.folder, draft.folder)
    assert all(word in str(error.value) for word in (str(draft.folder), *words))


def test_draft_folder_without_mtp_tensors_is_refused(build) -> None:
    target, draft = build("mimo", "target"), build("mimo", "draft")
    for name in draft.mtp_names:
        del draft.tensors[name]
    draft.save()
    with pytest.raises(
        CheckpointError, match=r"--speculative-draft-model-path .* lacks 16 of the 16"
    ):
        validate_checkpoint(target.folder, draft.folder)


def test_lone_nextn_layer_is_layer_zero(build) -> None:
    target, draft = build("deepseek", "target"), build("deepseek", "draft")
    draft.tensors = {
        name.replace(NEXTN, "model.layers.0"): draft.tensors[name] for name in draft.mtp_names
    }
    draft.mtp_names = []
    (draft.folder / MTP_SHARD).unlink()
    draft.config.update(architectures=["DeepseekV3ForCausalLMNextN"], num_hidden_layers=1)
    draft.save()
    assert validate_checkpoint(target.folder, draft.folder).num_mtp_tensors == 24


def test_lone_layer_of_hunyuan_is_behind_one_that_is_not_there(build) -> None:
    target, draft = build("hunyuan", "target"), build("hunyuan", "draft")
    draft.tensors = {
        name.replace(NEXTN, "model.layers.1"): draft.tensors[name] for name in draft.mtp_names
    }
    draft.mtp_names = []
    (draft.folder / MTP_SHARD).unlink()
    draft.config.update(architectures=["HYV3ForCausalLMNextN"], num_hidden_layers=1)
    draft.save()
    assert validate_checkpoint(target.folder, draft.folder).num_mtp_tensors == 23


def test_the_number_of_experts_may_have_transformers_name(build) -> None:
    checkpoint = build("qwen3_moe")
    checkpoint.config["num_local_experts"] = checkpoint.config.pop("num_experts")
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder) is not None
    checkpoint.config["num_local_experts"] = 3
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"experts\.2"):
        validate_checkpoint(checkpoint.folder)


def test_ernies_experts_end_where_config_json_says(build) -> None:
    checkpoint = build("ernie")
    checkpoint.config["moe_layer_end_index"] = 1
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder) is not None
    checkpoint.config["moe_layer_end_index"] = 0
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight"):
        validate_checkpoint(checkpoint.folder)


def test_packed_tensors_of_a_quantized_checkpoint_have_their_own_names_and_shapes(build) -> None:
    checkpoint = build("deepseek")
    name = f"{NEXTN}.self_attn.kv_b_proj"
    checkpoint.tensors.pop(f"{name}.weight")
    checkpoint.tensors[f"{name}.weight_packed"] = torch.zeros(22, 14, dtype=torch.uint8)
    checkpoint.tensors[f"{NEXTN}.eh_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
    checkpoint.mtp_names.append(f"{name}.weight_packed")
    checkpoint.save()
    with pytest.raises(CheckpointError):
        validate_checkpoint(checkpoint.folder)
    checkpoint.write_json("quant_model_description.json", {f"{name}.weight": "W4A8_DYNAMIC"})
    assert validate_checkpoint(checkpoint.folder).quantized


def test_float_tensors_of_a_quantized_checkpoint_keep_their_shapes(build) -> None:
    checkpoint = build("deepseek")
    checkpoint.config["quantization_config"] = {"quant_method": "fp8"}
    checkpoint.tensors[f"{NEXTN}.enorm.weight"] = torch.ones(31, dtype=torch.bfloat16)
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"enorm\.weight with shape"):
        validate_checkpoint(checkpoint.folder)


def test_experts_may_be_fused_into_one_tensor(build) -> None:
    checkpoint = build("deepseek")
    prefix = f"{NEXTN}.mlp.experts"
    for name in [n for n in checkpoint.tensors if n.startswith(f"{prefix}.")]:
        del checkpoint.tensors[name]
    checkpoint.tensors[f"{prefix}.gate_up_proj"] = torch.ones(2, 40, 32)
    checkpoint.tensors[f"{prefix}.down_proj"] = torch.ones(2, 32, 20)
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder) is not None
    checkpoint.tensors[f"{prefix}.down_proj"] = torch.ones(2, 20, 32)
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"experts\.down_proj with shape"):
        validate_checkpoint(checkpoint.folder)


def num_bytes(checkpoint, names) -> int:
    return sum(checkpoint.tensors[name].nbytes for name in names)


def test_scan_shrinks_to_the_mtp_layer_and_then_to_its_dense_part(build) -> None:
    checkpoint = build("deepseek")
    experts = [name for name in checkpoint.mtp_names if ".mlp.experts." in name]
    mtp_bytes = num_bytes(checkpoint, checkpoint.mtp_names)
    dense_bytes = mtp_bytes - num_bytes(checkpoint, experts)
    limits_and_scans = [
        (num_bytes(checkpoint, checkpoint.tensors), num_bytes(checkpoint, checkpoint.tensors)),
        (num_bytes(checkpoint, checkpoint.tensors) - 1, mtp_bytes),
        (mtp_bytes, mtp_bytes),
        (mtp_bytes - 1, dense_bytes),
    ]
    for limit, scanned in limits_and_scans:
        summary = validate_checkpoint(checkpoint.folder, scan_limit_bytes=limit)
        assert summary.num_bytes_scanned == scanned


def test_mtp_layer_of_a_large_target_is_still_scanned(build) -> None:
    checkpoint = build("mimo")
    checkpoint.tensors["model.norm.weight"][0] = float("nan")
    checkpoint.save()
    validate_checkpoint(checkpoint.folder, scan_limit_bytes=1)
    checkpoint.tensors[checkpoint.mtp_names[-1]][0] = float("nan")
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"NaN"):
        validate_checkpoint(checkpoint.folder, scan_limit_bytes=1)


def test_published_auto_map_is_ignored(build) -> None:
    checkpoint = build("deepseek")
    checkpoint.config["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    checkpoint.save()
    assert validate_checkpoint(checkpoint.folder) is not None
    assert validate_checkpoint(checkpoint.folder, trust_remote_code=True) is not None


def test_the_code_of_an_unknown_family_is_never_run(build, tmp_path: Path) -> None:
    target = build("mimo")
    draft = shutil.copytree(target.folder, tmp_path / "draft")
    target.config |= {"architectures": ["Unknown"], "auto_map": {"AutoModel": "modeling.Unknown"}}
    target.save()
    with pytest.raises(CheckpointError, match=r"without --trust-remote-code"):
        validate_checkpoint(target.folder, draft, trust_remote_code=True)


def test_tokenizer_flags_are_respected(build, tmp_path: Path) -> None:
    checkpoint = build("mimo")
    (checkpoint.folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert validate_checkpoint(checkpoint.folder, tokenizer_path=tmp_path) is not None
    assert validate_checkpoint(checkpoint.folder, tokenizer_path="organisation/name") is not None
    assert validate_checkpoint(checkpoint.folder, skip_tokenizer_init=True) is not None
    with pytest.raises(CheckpointError, match=r"--tokenizer-path .* does not exist"):
        validate_checkpoint(checkpoint.folder, tokenizer_path=tmp_path / "absent")


@pytest.mark.parametrize("hub_id", ["organisation/name", "XiaomiMiMo/MiMo-7B-RL", "s3://bucket/a"])
def test_hub_ids_are_left_to_sglang(hub_id: str) -> None:
    assert validate_checkpoint(hub_id) is None


@pytest.mark.parametrize(
    "path", ["./model", "/absent/model", "model", "a/b/c", "~/absent", "tests/x"]
)
def test_paths_that_do_not_exist_are_refused(path: str, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"--model-path .* does not exist; pass the folder"):
        validate_checkpoint(path)


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"--model-path .* is a file; pass the folder"):
        validate_checkpoint(tmp_path / "model.safetensors")
