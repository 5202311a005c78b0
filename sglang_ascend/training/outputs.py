"""Greedy outputs of the target on evaluation prompts, with hiddens: what `acceptance` reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import trange

from sglang_ascend.training.acceptance import Output
from sglang_ascend.training.decoder import Decoder


def read_prompts(path: Path) -> list[dict[str, str]]:
    """A JSON list of {"domain", "prompt"}.

    Raises:
        ValueError: the file holds anything else.
    """
    prompts = json.loads(path.read_text())
    wanted = {"domain", "prompt"}
    if not isinstance(prompts, list) or any(
        not isinstance(row, dict) or set(row) != wanted for row in prompts
    ):
        raise ValueError(f'{path} must be a JSON list of {{"domain": …, "prompt": …}} objects.')
    return prompts


@torch.inference_mode()
def greedy_outputs(
    folder: Path, prompts: list[dict[str, str]], max_new_tokens: int
) -> list[Output]:
    """The target's greedy reply to every prompt, all in one batch of single-token steps."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[list[int]] = []
    for row in prompts:
        turn = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        rows.append(tokenizer(text, add_special_tokens=False).input_ids)
    lengths = [len(row) for row in rows]
    steps = max(lengths) + max_new_tokens
    decoder = Decoder(folder, len(rows), steps)
    hidden: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [False] * len(rows)
    for position in trange(steps - 1, unit="token"):
        tokens = torch.tensor([row[min(position, len(row) - 1)] for row in rows])
        states = decoder.step(tokens, torch.full((len(rows),), position))
        following = decoder.logits(states).argmax(-1).tolist()
        for index, row in enumerate(rows):
            if position < len(row):
                hidden[index].append(states[index])
            if position == len(row) - 1 and not done[index]:
                row.append(following[index])
                ended = row[-1] == tokenizer.eos_token_id
                done[index] = ended or len(row) == lengths[index] + max_new_tokens
        if all(done):
            break
    return [
        Output(row["domain"], torch.tensor(tokens), length, _padded(states, len(tokens)))
        for row, tokens, length, states in zip(prompts, rows, lengths, hidden, strict=True)
    ]


def save_outputs(path: Path, outputs: list[Output]) -> None:
    """Writes outputs as one safetensors file."""
    tensors = {
        "tokens": torch.cat([output.tokens for output in outputs]).int(),
        "hidden": torch.cat([output.hidden for output in outputs]),
        "lengths": torch.tensor([len(output.tokens) for output in outputs]),
        "prompt_lengths": torch.tensor([output.prompt_length for output in outputs]),
    }
    domains = json.dumps([output.domain for output in outputs])
    save_file(tensors, path, metadata={"domains": domains})


def load_outputs(path: Path) -> list[Output]:
    """Reads what `save_outputs` wrote."""
    with safe_open(path, "pt") as file:
        domains = json.loads(file.metadata()["domains"])
        lengths = file.get_tensor("lengths").tolist()
        tokens = file.get_tensor("tokens").long().split(lengths)
        hidden = file.get_tensor("hidden").split(lengths)
        prompts = file.get_tensor("prompt_lengths").tolist()
    return [Output(*row) for row in zip(domains, tokens, prompts, hidden, strict=True)]


def _padded(states: list[torch.Tensor], length: int) -> torch.Tensor:
    """[length, hidden_size]; the last token of an output was never fed: its row is zero."""
    missing = [torch.zeros_like(states[0])] * (length - len(states))
    return torch.stack(states[:length] + missing)
