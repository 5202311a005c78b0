"""The trainable draft model: transformers' own, between an embedding and a head that stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from sglang_ascend.checkpoint.draft_model import validate_draft_model
from sglang_ascend.checkpoint.folder import let_others_read
from sglang_ascend.files import write_json
from sglang_ascend.quantization.writers.saving import save_tensors
from sglang_ascend.training.draft_model.start import DraftStart
from sglang_ascend.training.interface import ChainCache
from sglang_ascend.training.run_folder import CHECKPOINT, read_average

Tensor = torch.Tensor
# Files of a tokenizer and of how a model is asked, by what their names begin with.
KEPT = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")


class Student(nn.Module):
    """Implements `interface.ChainLayer`; embedding and head are not held.

    As it is served (SGLang's STANDALONE), slot i holds token i + 1 and what the target made of
    token i is not read. So the rows of step 1 are a forward over all tokens but the first, and step
    k from slot i, which sees the same tokens as step 1 from slot i + k - 1, is its row.
    """

    def __init__(self, start: DraftStart) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.model = AutoModelForCausalLM.from_config(start.config, dtype=torch.float32).model
        self.model.embed_tokens = None

    def forward(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, cache: ChainCache
    ) -> Tensor:
        """See `interface.ChainLayer`."""
        is_first = cache.step == 1
        cache.steps.append((embeddings, embeddings))  # no step attends to another
        if is_first:
            return self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return F.pad(hidden[:, 1:], (0, 0, 0, 1))


def untrained_student(start: DraftStart, device: torch.device) -> Student:
    """With the weights that its training begins with."""
    student = Student(start)
    student.load_state_dict(start.read(student.state_dict()))
    return student.to(device)


def started_student(start: DraftStart, run: Path, device: torch.device) -> Student:
    """The same, unless ``run`` holds a trainer's checkpoint, whose weights will be taken."""
    has_begun = (run / CHECKPOINT).exists()
    return Student(start).to(device) if has_begun else untrained_student(start, device)


def trained_student(start: DraftStart, run: Path, device: torch.device) -> Student:
    """The averaged weights of a trainer's folder, through bf16: that is what is served."""
    student = Student(start)
    averages = read_average(run)
    student.load_state_dict({name: value.bfloat16().float() for name, value in averages.items()})
    return student.to(device)


def export_student(start: DraftStart, student: Student, target: Path, out: Path) -> None:
    """Writes the draft model in bf16 to ``out``, with a tokenizer, and checks it as a server would.

    Raises:
        ValueError: a weight is not finite.
        CheckpointError: the result could not be served before ``target``.
    """
    out.mkdir(parents=True)
    tensors = student.state_dict() | start.read(start.outside)
    for name, weight in tensors.items():
        if not torch.isfinite(weight).all():
            raise ValueError(
                f"{name} holds NaN or infinity: train anew, in another folder, at a lower rate."
            )
    served = {name: weight.detach().cpu().bfloat16() for name, weight in tensors.items()}
    save_tensors(served, out / "model.safetensors", {"format": "pt"})
    for path in sorted(start.folder.iterdir()):
        if path.name.startswith(KEPT) and path.suffix in (".json", ".txt", ".jinja", ".model"):
            shutil.copyfile(path, out / path.name)
    fields = {name: value for name, value in start.fields.items() if name != "torch_dtype"}
    write_json(out / "config.json", fields | {"dtype": "bfloat16"})
    let_others_read(out)
    validate_draft_model(target, out)
