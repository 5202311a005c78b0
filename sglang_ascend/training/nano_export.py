"""Owns the command that joins target, NextN layer and tokenizer into one servable folder."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import load_file

from sglang_ascend.training.deepseek import DeepseekForCausalLM
from sglang_ascend.training.nano_checkpoint import save_checkpoint
from sglang_ascend.training.nano_config import NanoConfig
from sglang_ascend.training.nano_train import new_layer
from sglang_ascend.training.trainer import read_average


def main(
    target: Annotated[Path, typer.Option(help="Folder written by training.pretrain.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder written by training.tokenizer.")],
    out: Annotated[Path, typer.Option(help="The checkpoint folder to write.")],
    nextn: Annotated[
        Path | None, typer.Option(help="The NextN trainer's checkpoint; without it: untrained.")
    ] = None,
) -> None:
    """Write the checkpoint that `--model-path` takes."""
    config = NanoConfig()
    model = DeepseekForCausalLM(config)
    state = load_file(target / "progress.safetensors")
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    )
    layer = new_layer(config, model.model.norm.weight, seed=0)
    if nextn is not None:
        # The trainer averages parameters; the router's bias is a buffer and stays at zero.
        layer.load_state_dict(layer.state_dict() | read_average(nextn))
    save_checkpoint(out, model, layer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


if __name__ == "__main__":
    typer.run(main)
