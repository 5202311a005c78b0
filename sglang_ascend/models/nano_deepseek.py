"""nano-deepseek: a small DeepSeek-V3 (MLA, experts, one NextN layer), trained here and committed.

Owns where its files lie and which of them a servable folder needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

ARTIFACT = Path(__file__).parent / "artifacts" / "nano-deepseek"
FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "provenance.json",
)


def build(folder: Path, progress: Callable[[str], None] = lambda step: None) -> None:
    """Writes the servable checkpoint to the existing, empty `folder`.

    Raises:
        FileNotFoundError: a committed file is missing.
    """
    missing = [name for name in FILES if not (ARTIFACT / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{ARTIFACT} lacks {', '.join(missing)}: restore it from the repository or rebuild it "
            "with recipes/nano_deepseek/recipe.sh."
        )
    progress("copying")
    for name in FILES:
        shutil.copyfile(ARTIFACT / name, folder / name)
