"""Invariant: continuous batching stores, for every conversation, the tokens and hiddens that the
target would give that conversation alone."""

import json
import shutil
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chisquare
from tiny_targets import FAMILIES, WORDS
from transformers import PreTrainedTokenizerFast

from sglang_ascend.training.data import collate, load_shards, pass_order
from sglang_ascend.training.generation import generator as generator_module
from sglang_ascend.training.generation import outputs as outputs_module
from sglang_ascend.training.generation.conversation import (
    FORCED,
    REPLY,
    USER,
    ChatTokens,
    Conversation,
)
from sglang_ascend.training.generation.generate import generate_shards
from sglang_ascend.training.generation.generator import GenerateConfig, Generator
from sglang_ascend.training.generation.outputs import (
    greedy_outputs,
    load_outputs,
    sample,
    save_outputs,
)
from sglang_ascend.training.generation.shards import read_prompt_list
from sglang_ascend.training.targets.decoder import Decoder
from sglang_ascend.training.vocabulary.draft_list import frequent_ids, write_draft_vocabulary

CONFIG = GenerateConfig(
    rows=3,
    max_length=60,
    max_user_tokens=9,
    max_reply_tokens=14,
    reply_temperatures=(0.0,),
    second_turn_share=0.3,
    sequences_per_shard=4,
)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tiny_target):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def model(target):
    """The oracle: transformers' own attention and caches."""
    return target.model_class.from_pretrained(target.folder, dtype=torch.float32).eval()


@torch.no_grad()
def hiddens(model, tokens):
    return model.model(tokens[None]).last_hidden_state[0]


def test_stored_hiddens_are_those_of_the_conversation_alone(target, model):
    for row in islice(Generator(target, CONFIG, set()).run(), 8):
        stored = torch.stack(row.hidden).float()
        alone = hiddens(model, torch.tensor(row.tokens))[: len(stored)]
        assert len(stored) >= len(row.tokens) - 1
        assert (stored - alone).abs().max() < 0.02  # bf16 rounding of values up to about 4
        assert (stored[1:] - alone[:-1]).abs().max() > 0.5  # control: one position off


def test_greedy_replies_are_the_argmax_and_user_turns_end_within_their_limit(target, model):
    for row in islice(Generator(target, CONFIG, set()).run(), 8):
        logits = hiddens(model, torch.tensor(row.tokens)) @ model.lm_head.weight.T
        greedy = logits.argmax(-1).tolist()
        replies = [i for i, role in enumerate(row.roles) if role == REPLY]
        assert replies
        assert all(row.tokens[i] == greedy[i - 1] for i in replies)
        assert row.roles.count(USER) <= 2 * CONFIG.max_user_tokens
        assert len(row.tokens) <= CONFIG.max_length


@pytest.mark.parametrize(
    ("role", "temperature", "drawn"),
    [(USER, 0.0, {0, 1}), (REPLY, 1.0, {0, 1, 2}), (REPLY, 0, {0})],
)
def test_only_user_turns_are_cut_at_min_p_and_drawn_at_temperature_1(role, temperature, drawn):
    """Probabilities 0.6, 0.35 and 0.05; of 400 draws the last is missed once in 8e8 times."""
    torch.manual_seed(0)
    generator = Generator.__new__(Generator)
    generator.config = replace(CONFIG, user_min_p=0.1)
    generator.decoder = SimpleNamespace(logits=lambda hidden: hidden)
    rows = 400 * [SimpleNamespace(role=role, temperature=temperature)]
    logits = torch.tensor([0.6, 0.35, 0.05]).log().expand(len(rows), -1)
    assert set(generator._sample(logits, rows)) == drawn


def test_draws_have_the_probabilities_of_the_softmax_at_their_temperature():
    """Over 700 tokens, more than two blocks of them; a fifth have no probability."""
    torch.manual_seed(0)
    logits, count, temperature = 2 * torch.randn(1, 700), 40_000, 0.7
    logits[0, :140] = -torch.inf
    drawn = sample(logits.expand(count, -1), torch.full((count,), temperature))
    seen = torch.bincount(drawn, minlength=700).double()
    assert not seen[:140].any()

    def p_value(temperature):
        expected = count * (logits[0].double() / temperature).softmax(-1)
        often = expected > 5
        counts, wanted = (
            torch.cat([values[often], values[~often].sum()[None]]) for values in (seen, expected)
        )
        return chisquare(counts.numpy(), wanted.numpy()).pvalue

    assert p_value(temperature) > 1e-3
    assert p_value(0.75) < 1e-9  # control


def test_a_killed_generation_goes_on_behind_its_last_whole_shard(target, tmp_path):
    generate_shards(target, tmp_path, CONFIG, set(), 20)
    first = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    (tmp_path / "shard-000-00009.safetensors.part").write_text("killed while writing")
    generate_shards(target, tmp_path, CONFIG, set(), 120)
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) > len(first)
    assert all((tmp_path / name).read_bytes() == content for name, content in first.items())
    sequences = load_shards(paths)
    assert sum(int(sequence.trained.sum()) for sequence in sequences) >= 120
    assert sum(len(read_prompt_list(path)) for path in paths) == len(sequences)
    assert load_file(paths[0])["hidden"].dtype == torch.bfloat16


def test_batches_hold_every_conversation_once_and_rows_point_at_trained_tokens(target, tmp_path):
    generate_shards(target, tmp_path, CONFIG, set(), 80)
    sequences = load_shards(sorted(tmp_path.glob("*.safetensors")))
    lengths = [len(sequence.tokens) for sequence in sequences]
    batches = pass_order(lengths, 90, seed=1)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sequences)))
    assert batches == pass_order(lengths, 90, seed=1) != pass_order(lengths, 90, seed=2)
    batch = [sequences[index] for index in batches[0]]
    tokens, hidden, (sequence, position) = collate(batch, 3)
    assert hidden.shape[:2] == tokens.shape
    for row, place in zip(sequence.tolist(), position.tolist(), strict=True):
        assert batch[row].trained[place + 1]
        assert place >= 3


def test_a_template_that_leaves_no_room_for_a_prompt_is_refused(target, tmp_path):
    """No prompt of the package's would ever fit, and the search for one never end."""
    folder = shutil.copytree(target.folder, tmp_path / "with a long system prompt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "<|im_start|>" * 50 + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"leaves [0-7] to a prompt: take a larger --max-length"):
        Generator(replace(target, folder=folder), CONFIG, set())


def test_a_target_that_has_no_more_user_turns_is_not_asked_for_ever(target, tmp_path, monkeypatch):
    """What it wrote is kept, and a sentence says what would give more."""
    monkeypatch.setattr(generator_module, "prompt_key", lambda prompt: "always this one")
    monkeypatch.setattr(generator_module, "MAX_DROPPED", 20)
    config = replace(CONFIG, own_prompt_share=1.0, second_turn_share=0.0)
    short = generate_shards(target, tmp_path, config, set(), 10_000)
    (path,) = tmp_path.glob("*.safetensors")
    (sequence,) = load_shards([path])
    assert f"wrote {int(sequence.trained.sum())} of 10,000 tokens" in short.ran_dry
    assert "a smaller --own-share" in short.ran_dry
    assert not short.too_long


def test_a_reply_that_repeats_itself_is_seen_as_a_loop():
    def conversation(tokens):
        row = Conversation([1], [FORCED], None, None, 0.0, stage_start=1)
        for token in tokens:
            row.append(token, REPLY)
        return row

    assert conversation([5, 6, 7] * 20).loops
    assert not conversation(list(range(60))).loops


def test_evaluation_outputs_are_greedy_and_survive_the_file(target, model, tmp_path):
    prompts = [{"domain": "one", "prompt": "Write the x"}, {"domain": "two", "prompt": "a ? a x x"}]
    outputs = greedy_outputs(target, prompts, 12)
    save_outputs(tmp_path / "outputs.safetensors", outputs)
    for output, again in zip(outputs, load_outputs(tmp_path / "outputs.safetensors"), strict=True):
        logits = hiddens(model, output.tokens) @ model.lm_head.weight.T
        start = output.prompt_length
        assert output.tokens[start:].tolist() == logits.argmax(-1)[start - 1 : -1].tolist()
        assert (output.hidden[:-1] - hiddens(model, output.tokens)[:-1]).abs().max() < 1e-3
        assert torch.equal(output.tokens, again.tokens)
        assert (output.domain, start) == (again.domain, again.prompt_length)


def test_replies_to_many_prompts_are_written_a_few_at_a_time(target, model, tmp_path, monkeypatch):
    """Of like length together: a long prompt costs the short ones no cache."""
    texts = ["x " * n for n in (30, 1, 2, 29, 3)]
    prompts = [{"domain": str(n), "prompt": text} for n, text in enumerate(texts)]
    made = []

    class Recorded(Decoder):
        def __init__(self, target, rows, max_length):
            made.append((rows, max_length))
            super().__init__(target, rows, max_length)

    monkeypatch.setattr(outputs_module, "Decoder", Recorded)
    monkeypatch.setattr(outputs_module, "ROWS", 2)
    outputs = greedy_outputs(target, prompts, 8)
    assert [rows for rows, _ in made] == [2, 2, 1]
    assert made[0][1] + 20 < made[1][1] < made[2][1]
    assert [output.domain for output in outputs] == ["0", "1", "2", "3", "4"]
    for text, output in zip(texts, outputs, strict=True):
        assert (output.tokens == WORDS.index("x")).sum() >= len(text.split())
        logits = hiddens(model, output.tokens) @ model.lm_head.weight.T
        start = output.prompt_length
        assert output.tokens[start:].tolist() == logits.argmax(-1)[start - 1 : -1].tolist()


def test_the_chat_template_is_cut_where_the_contents_go(target):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target.folder)
    chat = ChatTokens.of(target.folder, tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [*chat.prefix, WORDS.index("x"), *chat.to_reply] == ids
    assert chat.end_of(REPLY) == tokenizer.eos_token_id


THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|> {{ m.content }} {% else %}"
    "assistant ? {{ m.content }} the <|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant Write {% endif %}"
)


def test_a_reply_begins_and_ends_as_a_server_has_it_begin_and_end(target):
    """The template writes past replies otherwise, and a word before the token that ends them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target.folder)
    tokenizer.chat_template = THINKING
    chat = ChatTokens.of(target.folder, tokenizer)
    assert [WORDS[i] for i in chat.to_reply] == ["assistant", "Write"]
    assert [WORDS[i] for i in chat.to_user] == ["<|im_end|>", "<|im_start|>"]
    assert chat.end_of(REPLY) == tokenizer.eos_token_id


def test_a_reply_ends_at_every_token_at_which_a_server_ends_one(target, tmp_path):
    prompts = [{"domain": "one", "prompt": "Write the x"}]
    (whole,) = greedy_outputs(target, prompts, 12)
    reply = whole.tokens[whole.prompt_length :].tolist()
    end = reply[1]
    folder = shutil.copytree(target.folder, tmp_path / "with two ends")
    ends = json.dumps({"eos_token_id": [WORDS.index("<|im_end|>"), end]})
    (folder / "generation_config.json").write_text(ends)
    (cut,) = greedy_outputs(replace(target, folder=folder), prompts, 12)
    assert cut.tokens[cut.prompt_length :].tolist() == reply[: reply.index(end) + 1] != reply


def test_a_reply_has_its_whole_length_where_one_token_leads_to_it(target):
    """And not what the user turn before it leaves."""
    config = replace(CONFIG, own_prompt_share=1.0, second_turn_share=0.0)
    generator = Generator(target, config, set())
    generator.chat = replace(generator.chat, to_reply=generator.chat.to_reply[:1])
    for row in islice(generator.run(), 8):
        is_full = row.roles.count(REPLY) == config.max_reply_tokens
        assert is_full or row.tokens[-1] == generator.chat.end_of(REPLY)
        assert USER in row.roles


def test_the_draft_vocabulary_holds_special_and_frequent_tokens_then_low_ids(target, tmp_path):
    generate_shards(target, tmp_path, CONFIG, set(), 40)
    paths = tmp_path.glob("*.safetensors")
    tokens = torch.cat([load_file(path)["tokens"] for path in paths]).long()
    counts = torch.bincount(tokens, minlength=20)
    ids = frequent_ids(tmp_path, [19], 20, 4)
    frequent = sorted(range(20), key=lambda i: (-counts[i].item(), i))
    assert ids == sorted([19, *[i for i in frequent if i != 19][:3]])
    everything = frequent_ids(tmp_path, [19], 20, 99)
    assert everything == list(range(20))
    write_draft_vocabulary(tmp_path, ids)
    assert json.loads((tmp_path / "draft_vocabulary.json").read_text()) == {"token_ids": ids}


def test_conversations_fit_where_little_does_and_a_user_turn_without_an_end_is_none(
    target, tmp_path
):
    """Of prompts of templates too, some of which are longer than all that is left."""
    config = replace(CONFIG, max_length=34, max_user_tokens=30, own_prompt_share=0.5)
    generate_shards(target, tmp_path, config, set(), 200)
    for path in sorted(tmp_path.glob("*.safetensors")):
        shard = load_file(path)
        assert int(shard["lengths"].max()) <= 34
        assert all(isinstance(prompt, str) for prompt in read_prompt_list(path))
    generate_shards(target, tmp_path, config, set(), 260)  # goes on behind them


def test_replies_that_are_not_whole_are_said_to_be(tmp_path):
    path = tmp_path / "outputs.safetensors"
    path.write_bytes(b"cut")
    with pytest.raises(
        ValueError, match=r"outputs\.safetensors holds no whole replies .* delete it"
    ):
        load_outputs(path)
