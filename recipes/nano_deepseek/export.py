"""Owns the command that joins target and tokenizer into one checkpoint folder."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import load_file

from recipes.nano_deepseek.checkpoint import save_target
from recipes.nano_deepseek.config import NanoConfig
from recipes.nano_deepseek.model import DeepseekForCausalLM


def main(
    target: Annotated[Path, typer.Option(help="Folder written by pretrain.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder written by text.tokenizer.")],
    out: Annotated[Path, typer.Option(help="The checkpoint folder to write.")],
) -> None:
    """Write the checkpoint that `sglang-ascend train` takes as target."""
    model = DeepseekForCausalLM(NanoConfig())
    state = load_file(target / "progress.safetensors")
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    )
    save_target(out, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)


if __name__ == "__main__":
    typer.run(main)
