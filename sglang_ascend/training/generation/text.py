"""Text that others wrote, with the target's hiddens: one forward, and nothing is generated.

What a draft learns from a row is the target's distribution there, whoever wrote the tokens before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sglang_ascend.training.generation.origin import checked_fingerprint
from sglang_ascend.training.generation.prompts import prompt_key
from sglang_ascend.training.generation.shards import TARGET, read_metadata, write_documents
from sglang_ascend.training.provenance import digest
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.packs import packed
from sglang_ascend.training.vocabulary.sources import Source, documents

Tensor = torch.Tensor
DOCUMENTS_PER_SHARD = 256
MIN_TOKENS = 8  # of a piece: a shorter one has hardly a chain to learn from
SHORTEST_HELD_OUT = 16  # letters of a prompt; what is shorter may stand in any text
# In a shard's metadata: how many pieces of the stream it holds, what the stream is of and how long
# its pieces are.
_COUNT, _SOURCES, _LENGTH = "documents", "sources", "max_length"


@torch.inference_mode()
def hidden_states(model: Any, pieces: list[Tensor]) -> list[Tensor]:
    """[length, hidden_size] bf16 of each sequence, several of them in one forward.

    Args:
        model: what `Target.load_model` gives, on any device; the states are the CPU's.
        pieces: int64 [length] each.
    """
    found: list[Tensor] = []
    device = model.device
    for pack in packed(pieces):
        states = model.model(
            pack.tokens[None].to(device),
            attention_mask=pack.mask.to(device),
            position_ids=pack.positions.to(device),
        ).last_hidden_state[0]
        found += [part.clone() for part in states.bfloat16().cpu().split(pack.lengths)]
    return found


def write_text_shards(
    target: Target,
    out: Path,
    sources: list[Source],
    max_length: int,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
    excluded: Collection[str] = (),
) -> None:
    """Adds shards of `sources` in turns to `out` until they hold `num_tokens`, or the text ends.

    After a kill the same call goes on behind the last whole shard; one that was deleted is made
    again. `dtype` is of the products. Documents that hold the `prompt_key` of an `excluded` prompt
    are left out, of those with `SHORTEST_HELD_OUT` letters.

    Raises:
        ValueError: a source cannot be read, or has no piece that is long enough; shards are of
            another target, of other sources or of pieces of another length.
    """
    from transformers import AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    done = {path: read_metadata(path) for path in sorted(out.glob("text-*.safetensors"))}
    counted, last = sum(int(made["tokens"]) for made in done.values()), max(done, default=None)
    own = checked_fingerprint(target, done)
    files = digest([[source.path.name, source.sha256()] for source in sources])
    _refuse_other(out, list(done.values()), files, max_length)
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    begin = [i for i in tokenizer("").input_ids if i != tokenizer.eos_token_id]
    held_out = [key for key in excluded if len(key) >= SHORTEST_HELD_OUT]
    stream = _pieces(sources, tokenizer, begin, max_length, held_out)
    made_by = {TARGET: own, _SOURCES: files, _LENGTH: str(max_length)}
    model = target.load_model(dtype)
    with tqdm(desc="text", total=num_tokens, initial=counted, unit="token") as bar:
        for number in count():
            path = out / f"text-{number:05d}.safetensors"
            if path in done:
                list(islice(stream, int(done[path][_COUNT])))
                continue
            if counted >= num_tokens and (last is None or path > last):
                break
            pieces = list(islice(stream, DOCUMENTS_PER_SHARD))
            if not pieces:
                break
            states = hidden_states(model, [torch.tensor(piece) for piece in pieces])
            forced = len(begin) or 1  # nothing drafts a first token
            rows = [(piece, forced, state) for piece, state in zip(pieces, states, strict=True)]
            tokens = sum(len(piece) - forced for piece in pieces)
            metadata = {_COUNT: str(len(pieces)), "tokens": str(tokens), **made_by}
            write_documents(path, rows, metadata)
            counted += tokens
            bar.update(tokens)
    if not counted:
        raise ValueError(f"{sources[0].path} has no text of {MIN_TOKENS} tokens: give more --text.")


def _refuse_other(out: Path, done: list[dict[str, str]], files: str, max_length: int) -> None:
    """Refuses shards of other pieces than those that would be skipped for them."""
    if any(made.get(_SOURCES, files) != files for made in done):
        raise ValueError(
            f"{out} has shards of other text: give the same --text, more of it by --tokens, or "
            "name another folder for new text."
        )
    if before := {int(made.get(_LENGTH, max_length)) for made in done} - {max_length}:
        raise ValueError(
            f"{out} has shards of pieces of {max(before)} tokens: give the same --max-length, or "
            "name another folder."
        )


def _pieces(
    sources: list[Source],
    tokenizer: Any,
    begin: list[int],
    max_length: int,
    excluded: Collection[str],
) -> Iterator[list[int]]:
    """Pieces of at most `max_length` tokens, none twice, of a document of each source in turn."""
    seen: set[int] = set()

    def encode(text: str) -> list[int]:
        key = prompt_key(text) if excluded else ""
        if any(one in key for one in excluded):
            return []
        return tokenizer(text, add_special_tokens=False).input_ids

    size = max_length - len(begin)
    for tokens in _in_turns([documents(source, encode) for source in sources]):
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            key = hash(tuple(piece))
            if len(piece) >= MIN_TOKENS and key not in seen:
                seen.add(key)
                yield [*begin, *piece]


def _in_turns(streams: list[Iterator[list[int]]]) -> Iterator[list[int]]:
    """One of each stream, and again, until all have ended."""
    nothing: list[int] = []
    for row in zip_longest(*streams, fillvalue=nothing):
        yield from (one for one in row if one is not nothing)
