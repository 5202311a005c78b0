"""Invariant: documents that share a forward see nothing of each other, and become shards that a
killed command goes on with."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_targets import FAMILIES, write_target
from transformers import AutoTokenizer

from sglang_ascend.training.data import load_shards
from sglang_ascend.training.generation import text as text_module
from sglang_ascend.training.generation.prompts import prompt_key
from sglang_ascend.training.generation.text import hidden_states, write_text_shards
from sglang_ascend.training.provenance import generated
from sglang_ascend.training.targets import packs
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.vocabulary.draft_list import frequent_ids
from sglang_ascend.training.vocabulary.sources import parse_sources

PIECES = [torch.arange(length) % 10 for length in (9, 21, 2, 14)]
WORDS = "Write the x ? a the user"


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tiny_target):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def oracle(target):
    """Of one document alone, by transformers' own attention and mask."""
    model = target.model_class.from_pretrained(target.folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def of(piece):
        return model.model(piece[None]).last_hidden_state[0]

    return of


def largest_difference(target, oracle):
    found = hidden_states(target.load_model(), PIECES)
    pairs = zip(found, PIECES, strict=True)
    return max((state.float() - oracle(piece)).abs().max().item() for state, piece in pairs)


def test_packed_documents_are_as_each_is_alone(target, oracle):
    assert largest_difference(target, oracle) < 0.02  # bf16 rounding of values up to about 4


def test_without_the_mask_a_document_would_see_the_one_before(target, oracle, monkeypatch):
    """Control: causal over the whole row."""
    make = packs.Pack.__init__

    def unmasked(self, tokens):
        make(self, tokens)
        self.mask = torch.ones_like(self.mask).tril()

    monkeypatch.setattr(packs.Pack, "__init__", unmasked)
    assert largest_difference(target, oracle) > 0.5


def test_text_is_trained_on_from_its_second_token_and_a_kill_loses_nothing(tmp_path, monkeypatch):
    target = Target.open(write_target(tmp_path / "target", "LlamaForCausalLM"))
    monkeypatch.setattr(text_module, "DOCUMENTS_PER_SHARD", 4)
    words = WORDS.split()
    lines = [" ".join(words[i % 7] for i in range(n, 2 * n + 12)) for n in range(10)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, [*lines, lines[0], "x"])))
    sources = parse_sources([str(tmp_path / "text.jsonl")])
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write_text_shards(target, whole, sources, 16, 10_000)
    write_text_shards(target, resumed, sources, 16, 20)
    assert len(list(resumed.iterdir())) == 1
    (resumed / "text-00001.safetensors.part").write_text("killed while writing")
    write_text_shards(target, resumed, sources, 16, 10_000)
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) > 2
    for name in names:
        one, two = load_file(whole / name), load_file(resumed / name)
        assert all(torch.equal(one[key], two[key]) for key in one)
    sequences = load_shards([whole / name for name in names])
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    pieces = [ids[i : i + 16] for ids in (tokenizer(t).input_ids for t in lines) for i in (0, 16)]
    wanted = [piece for piece in pieces if len(piece) >= text_module.MIN_TOKENS]
    wanted = list(dict.fromkeys(map(tuple, wanted)))
    assert [tuple(sequence.tokens.tolist()) for sequence in sequences] == wanted
    assert all(s.trained.tolist() == [False] + [True] * (len(s.tokens) - 1) for s in sequences)
    counts = generated(whole)
    assert counts["sampled_tokens"] == 0
    assert counts["text_tokens"] == sum(len(piece) - 1 for piece in wanted)


def test_a_shard_that_was_deleted_is_made_again_and_no_other(tmp_path, monkeypatch):
    target = Target.open(write_target(tmp_path / "target", "LlamaForCausalLM"))
    monkeypatch.setattr(text_module, "DOCUMENTS_PER_SHARD", 2)
    words = WORDS.split()
    lines = [" ".join(words[i % 7] for i in range(n, 2 * n + 12)) for n in range(8)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sources, out = parse_sources([str(tmp_path / "text.jsonl")]), tmp_path / "out"
    write_text_shards(target, out, sources, 16, 10_000)
    whole = {path.name: load_file(path) for path in out.iterdir()}
    assert len(whole) > 3
    (out / "text-00001.safetensors").unlink()
    write_text_shards(target, out, sources, 16, generated(out)["text_tokens"] + 1)
    assert {path.name for path in out.iterdir()} == whole.keys()
    for name, tensors in whole.items():
        again = load_file(out / name)
        assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_shards_of_other_text_are_refused(tmp_path):
    """Its first pieces would be taken for those that the shards hold, and skipped."""
    target = Target.open(write_target(tmp_path / "target", "LlamaForCausalLM"))
    for name in ("one", "other"):
        (tmp_path / f"{name}.txt").write_text(f"Write the {name} ? a the user\n" * 40)
    one, other = (parse_sources([str(tmp_path / f"{n}.txt")]) for n in ("one", "other"))
    write_text_shards(target, tmp_path / "data", one, 16, 20)
    with pytest.raises(ValueError, match="shards of other text: give the same --text"):
        write_text_shards(target, tmp_path / "data", [*one, *other], 16, 10_000)
    write_text_shards(target, tmp_path / "data", one, 16, 40)
    with pytest.raises(ValueError, match="shards of pieces of 16 tokens: give the same"):
        write_text_shards(target, tmp_path / "data", one, 24, 10_000)


def test_text_with_a_held_out_prompt_is_left_out(tmp_path):
    target = Target.open(write_target(tmp_path / "target", "LlamaForCausalLM"))
    rows = [f"{word} " * 12 for word in ("Write", "the", "user")]
    rows[1] = [
        {"role": "user", "content": "The user ? a the user, x"},
        {"role": "assistant", "content": rows[1]},
    ]
    lines = [json.dumps(row if isinstance(row, str) else {"messages": row}) for row in rows]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    sources = parse_sources([str(tmp_path / "text.jsonl")])
    held_out, short = prompt_key("the User A; the user x!"), prompt_key("the the")
    for name, excluded, num_documents in (("all", {short}, 3), ("some", {held_out, short}, 2)):
        write_text_shards(target, tmp_path / name, sources, 64, 10_000, excluded=excluded)
        (path,) = (tmp_path / name).iterdir()
        assert len(load_file(path)["lengths"]) == num_documents


def test_sources_take_turns_until_each_has_ended(tmp_path, monkeypatch):
    """Few tokens of much text are of all of it, and not of its first file."""
    target = Target.open(write_target(tmp_path / "target", "LlamaForCausalLM"))
    words = WORDS.split()
    texts = {name: [f"{word} " * 12 for word in words[a:b]] for name, a, b in SPANS}
    for name, lines in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sources = parse_sources([str(tmp_path / f"{name}.jsonl") for name in texts])
    write_text_shards(target, tmp_path / "data", sources, 32, 10_000)
    sequences = load_shards(sorted((tmp_path / "data").iterdir()))
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    written = [tokenizer.decode(sequence.tokens).split()[-1] for sequence in sequences]
    assert written == [words[0], words[3], words[1], words[2]]
    # What others wrote does not say what the target will: the lowest ids, as without any count.
    assert frequent_ids(tmp_path / "data", [], 10, 3) == [0, 1, 2]


SPANS = (("long", 0, 3), ("short", 3, 4))
