"""Owns nano-deepseek's checkpoint files, under the tensor names of transformers and SGLang."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.nano_deepseek.config import NanoConfig
from recipes.nano_deepseek.model import DeepseekForCausalLM
from recipes.nano_deepseek.text.tokenizer import BOS_ID, END_ID, PAD_ID

WEIGHTS = "model.safetensors"
_GATE_UP, _DOWN = "mlp.experts_gate_up", "mlp.experts_down"


def unstack_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> the checkpoint's: one matrix for each expert and projection."""
    named = {}
    for name, tensor in state.items():
        prefix = name.removesuffix("experts_gate_up").removesuffix("experts_down") + "experts"
        if name.endswith(_GATE_UP):
            for expert, (gate, up) in enumerate(tensor):
                named[f"{prefix}.{expert}.gate_proj.weight"] = gate
                named[f"{prefix}.{expert}.up_proj.weight"] = up
        elif name.endswith(_DOWN):
            for expert, down in enumerate(tensor):
                named[f"{prefix}.{expert}.down_proj.weight"] = down
        else:
            named[name] = tensor
    return named


def stack_experts(named: dict[str, Tensor], config: NanoConfig) -> dict[str, Tensor]:
    """The inverse of `unstack_experts`."""
    state = {name: tensor for name, tensor in named.items() if ".experts." not in name}
    first = "experts.0.down_proj.weight"
    for prefix in [name.removesuffix(first) for name in named if name.endswith(first)]:
        gate, up, down = (
            torch.stack(
                [
                    named[f"{prefix}experts.{expert}.{projection}_proj.weight"]
                    for expert in range(config.n_routed_experts)
                ]
            )
            for projection in ("gate", "up", "down")
        )
        state[f"{prefix}experts_gate_up"] = torch.stack([gate, up], 1)
        state[f"{prefix}experts_down"] = down
    return state


def save_target(folder: Path, target: DeepseekForCausalLM) -> None:
    """Write weights (bf16; the router's bias fp32), config and generation config."""
    config = target.config
    tensors = unstack_experts(target.state_dict())
    for name, tensor in tensors.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensors[name] = tensor.to(dtype).clone(memory_format=torch.contiguous_format)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (WEIGHTS + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone
    partial.replace(folder / WEIGHTS)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    for name, content in (
        ("config.json", config.to_checkpoint()),
        ("generation_config.json", generation | {"do_sample": False}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_target(folder: Path) -> DeepseekForCausalLM:
    """Read the target in fp32, in evaluation mode, without a NextN layer beside it."""
    config = NanoConfig()
    target = DeepseekForCausalLM(config)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    nextn = f"model.layers.{config.num_hidden_layers}."
    state = {name: t for name, t in tensors.items() if not name.startswith(nextn)}
    target.load_state_dict(stack_experts(state, config))
    return target.eval()
