"""Writes SmolLM2-135M-Instruct, without an MTP layer, from the installed wheel."""

from pathlib import Path
from typing import Annotated

import typer
from safetensors.torch import save_file

from sglang_ascend.files import write_json
from sglang_ascend.models import smollm2


def main(out: Annotated[Path, typer.Argument(help="Empty or new folder to write.")]) -> None:
    """Write the target that the recipe trains an MTP layer for."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(dict(smollm2.target_tensors()), out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", smollm2.target_config())
    smollm2.save_tokenizer(out)


if __name__ == "__main__":
    typer.run(main)
