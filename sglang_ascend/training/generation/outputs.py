"""Greedy outputs of the target on evaluation prompts, with hiddens: what `acceptance` reads."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from tqdm import trange

from sglang_ascend.files import refuse_unwritable, replaced
from sglang_ascend.quantization.writers.saving import save_tensors
from sglang_ascend.training.acceptance import Output
from sglang_ascend.training.generation.conversation import reply_ends
from sglang_ascend.training.generation.origin import fingerprint
from sglang_ascend.training.generation.shards import with_last_hidden
from sglang_ascend.training.provenance import digest
from sglang_ascend.training.targets.decoder import Decoder
from sglang_ascend.training.targets.families import Target

BLOCK = 256  # tokens of a vocabulary whose probabilities are summed first
ROWS = 128  # replies that are written at once
_ASKED = "asked"


def chat_prompts(tokenizer, prompts: list[dict[str, str]]) -> list[list[int]]:
    """Token ids of every prompt as a first user turn, up to where the reply begins; without a chat
    template the reply is what continues the prompt."""
    if not tokenizer.chat_template:
        return [tokenizer(row["prompt"]).input_ids for row in prompts]
    turns = [[{"role": "user", "content": row["prompt"]}] for row in prompts]
    texts = [
        tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        for turn in turns
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def greedy_outputs(
    target: Target, prompts: list[dict[str, str]], max_new_tokens: int
) -> list[Output]:
    """The target's greedy reply to every prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    replies = greedy_replies(target, tokenizer, prompts, max_new_tokens)
    return [
        Output(prompt["domain"], tokens, length, hidden)
        for prompt, (length, tokens, hidden) in zip(prompts, replies, strict=True)
    ]


def greedy_replies(
    target: Target, tokenizer, prompts: list[dict[str, str]], max_new_tokens: int
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of every prompt how many tokens it has, and as `continue_prompts` the tokens and hiddens of
    it and of its reply, which ends where a server ends one.

    `ROWS` prompts at once, of like lengths: each row of a batch has a cache as long as the longest.
    """
    rows, ends = chat_prompts(tokenizer, prompts), reply_ends(target.folder, tokenizer)
    by_length = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    found = {}
    for start in range(0, len(rows), ROWS):
        places = sorted(by_length[start : start + ROWS])
        batch = [rows[place] for place in places]
        continued = continue_prompts(target, batch, ends, max_new_tokens)
        found |= dict(zip(places, continued, strict=True))
    return [(len(row), *found[place]) for place, row in enumerate(rows)]


@torch.inference_mode()
def continue_prompts(
    target: Target,
    prompts: list[list[int]],
    ends: Collection[int],
    max_new_tokens: int,
    temperatures: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens int64 [n] and hiddens [n, hidden_size] of every prompt and its continuation up to
    one of `ends` or `max_new_tokens`, all in one batch of single-token steps.

    Temperature 0, or none given, is greedy. The last token was never fed: its hidden is zero.
    """
    rows, lengths = [list(row) for row in prompts], [len(row) for row in prompts]
    steps = max(lengths) + max_new_tokens - 1
    decoder = Decoder(target, len(rows), steps)
    hidden: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [False] * len(rows)
    for position in trange(steps, desc="replies", unit="token"):
        tokens = torch.tensor([row[min(position, len(row) - 1)] for row in rows])
        states = decoder.step(tokens, torch.full((len(rows),), position))
        kept = states.cpu()
        following = sample(decoder.logits(states), temperatures, generator).tolist()
        for index, row in enumerate(rows):
            if position < len(row):
                hidden[index].append(kept[index])
            if position == len(row) - 1 and not done[index]:
                row.append(following[index])
                ended = row[-1] in ends
                done[index] = ended or len(row) == lengths[index] + max_new_tokens
        if all(done):
            break
    return [
        (torch.tensor(row), with_last_hidden(states, len(row)))
        for row, states in zip(rows, hidden, strict=True)
    ]


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """One token id for each row of [rows, vocabulary]; temperature 0 is greedy."""
    tokens = logits.max(-1).indices  # several times faster than argmax in bfloat16
    if temperatures is None or not temperatures.any():
        return tokens
    temperatures = temperatures.to(logits.device)
    warm = temperatures.nonzero()[:, 0]
    tokens[warm] = _draw((logits[warm].float() / temperatures[warm, None]).softmax(-1), generator)
    return tokens


def _draw(probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One index for each row of [rows, n], by inverse transform: first the block of indices whose
    cumulative sum passes the drawn share, then the index in it. Two short cumulative sums are far
    cheaper than noise for every index."""
    rows = len(probs)
    blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).view(rows, -1, BLOCK)
    drawn = torch.rand(rows, 1, generator=generator).to(probs.device)
    block, share = _pass(blocks.sum(-1), drawn)
    within, _ = _pass(blocks[torch.arange(rows, device=probs.device), block[:, 0]], share)
    return (block * BLOCK + within)[:, 0]


def _pass(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index whose cumulative weight passes the share `uniform` of all [rows, 1], and how far
    into it that share lies."""
    mass = weights.cumsum(-1)
    wanted = uniform * mass[:, -1:]
    # Next to 1 a share may round to the whole: the last index with a weight takes it.
    wanted = torch.minimum(wanted, torch.nextafter(mass[:, -1:], mass.new_zeros(())))
    index = torch.searchsorted(mass, wanted, right=True)
    weight = weights.gather(1, index)
    return index, ((wanted - (mass.gather(1, index) - weight)) / weight).clamp(0, 1)


def kept_outputs(
    path: Path, target: Target, prompts: list[dict[str, str]], max_new_tokens: int
) -> list[Output]:
    """`greedy_outputs`, read from `path` or, where there is no such file, made and kept there.

    Raises:
        ValueError: the file holds replies of another target, to other prompts or of another length,
            or cannot be written.
    """
    asked = {
        "--target": fingerprint(target),
        "--prompts": digest(prompts),
        "--max-new-tokens": max_new_tokens,
    }
    if not path.is_file():
        refuse_unwritable(path, "--outputs")
        save_outputs(path, greedy_outputs(target, prompts, max_new_tokens), asked)
    outputs = load_outputs(path)
    with safe_open(path, "pt") as file:
        before = json.loads(file.metadata().get(_ASKED, "{}"))
    others = [name for name, value in asked.items() if before.get(name, value) != value]
    if others:
        raise ValueError(
            f"{path} holds replies that were written with another {others[0]}: name another "
            "--outputs for these, or delete it."
        )
    return outputs


def save_outputs(
    path: Path, outputs: list[Output], asked: dict[str, str | int] | None = None
) -> None:
    """Writes outputs as one safetensors file, with the options that they depend on."""
    tensors = {
        "tokens": torch.cat([output.tokens for output in outputs]).int(),
        "hidden": torch.cat([output.hidden for output in outputs]),
        "lengths": torch.tensor([len(output.tokens) for output in outputs]),
        "prompt_lengths": torch.tensor([output.prompt_length for output in outputs]),
    }
    domains = json.dumps([output.domain for output in outputs])
    with replaced(path) as part:
        save_tensors(tensors, part, {"domains": domains, _ASKED: json.dumps(asked or {})})


def load_outputs(path: Path) -> list[Output]:
    """Reads what `save_outputs` wrote.

    Raises:
        ValueError: it did not write this file, or not all of it.
    """
    try:
        with safe_open(path, "pt") as file:
            domains = json.loads(file.metadata()["domains"])
            lengths = file.get_tensor("lengths").tolist()
            tokens = file.get_tensor("tokens").long().split(lengths)
            hidden = file.get_tensor("hidden").split(lengths)
            prompts = file.get_tensor("prompt_lengths").tolist()
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no whole replies ({error}): delete it and run the same command again."
        ) from None
    return [Output(*row) for row in zip(domains, tokens, prompts, hidden, strict=True)]
