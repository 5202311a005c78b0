"""The recipe for a GPU writes what the target would write to each prompt alone, and trains on it.

It runs here on a CPU, without its graph, on a tiny target in float32; transformers' own attention
is the oracle.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tiny_targets import WORDS, write_target
from transformers import AutoTokenizer
from typer.testing import CliRunner

from recipes.smollm2_mtp.card import __main__ as card
from recipes.smollm2_mtp.card.conversations import Conversations
from recipes.smollm2_mtp.card.decode import CardDecoder, Weights, masked, paged
from recipes.smollm2_mtp.card.store import Store
from recipes.smollm2_mtp.card.write import Prompts, check, write
from sglang_ascend.speculative.vocabulary.file import read_draft_vocabulary
from sglang_ascend.training.export import export
from sglang_ascend.training.generation.conversation import (
    FORCED,
    REPLY,
    USER,
    ChatTokens,
)
from sglang_ascend.training.generation.generator import GenerateConfig
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import new_layer

CONFIG = GenerateConfig(
    rows=6,
    max_length=64,
    max_user_tokens=9,
    max_reply_tokens=14,
    own_prompt_share=0.3,
    second_turn_share=0.3,
)
SECONDS = 600


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(write_target(tmp_path_factory.mktemp("target"), "MiMoForCausalLM"))


@pytest.fixture(scope="module")
def weights(target: Target) -> Weights:
    config = dict(target.config.fields)
    return Weights(target.read(target.tensors), config, target.device, torch.float32)


@pytest.fixture(scope="module")
def model(target: Target):
    return target.model_class.from_pretrained(target.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def chat(target: Target) -> ChatTokens:
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    return ChatTokens.of(target.folder, tokenizer)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (400,), generator=generator)
    words = torch.randint(5, len(WORDS), (int(lengths.sum()),), generator=generator)
    tensors = {"tokens": words.to(torch.uint16), "lengths": lengths.to(torch.uint8)}
    save_file(tensors, tmp_path / "prompts.safetensors")
    return tmp_path / "prompts.safetensors"


@torch.no_grad()
def hidden_of(model, tokens: torch.Tensor) -> torch.Tensor:
    return model.model(tokens[None]).last_hidden_state[0]


def written(weights: Weights, chat: ChatTokens, prompts: Path, count: int) -> Store:
    """Conversations until there are `count`, all in float32."""
    torch.manual_seed(0)
    conversations = Conversations(weights, chat, CONFIG)
    store, queue = Store(conversations, 10_000), Prompts(prompts, torch.device("cpu"))
    while len(store.starts) < count:
        done = conversations.rows.done.nonzero()[:, 0]
        assert store.add(conversations, done)
        own = (done < conversations.num_warm) & (done % 2 == 0)
        conversations.begin(done, *queue.take(own))
        conversations.step()
    return store


def turns_of(store: Store, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, roles and hidden states of a conversation, its prefix included."""
    tokens, _, hidden = store.padded([index])
    own = slice(store.starts[index], store.starts[index] + store.lengths[index] - store.shared)
    roles = torch.cat([torch.zeros(store.shared, dtype=torch.uint8), store.roles[own]])
    return tokens[0], roles, hidden[0]


@pytest.mark.parametrize("attend", [paged, masked])
def test_a_step_is_the_targets_at_any_mix_of_positions(weights, model, attend) -> None:
    decoder = CardDecoder(weights, rows=3, max_length=20)
    decoder.attend = attend
    tokens = torch.randint(len(WORDS), (3, 20), generator=torch.Generator().manual_seed(1))
    wanted = torch.stack([hidden_of(model, row) for row in tokens])
    positions, every = torch.zeros(3, dtype=torch.long), torch.arange(3)
    for step in range(19):
        hidden = decoder.step(tokens[every, positions], positions)
        torch.testing.assert_close(hidden, wanted[every, positions], rtol=1e-4, atol=1e-4)
        positions = positions + torch.tensor([1, step % 2, step % 3 == 0])


def test_what_is_kept_is_what_the_target_would_write(weights, model, chat, prompts) -> None:
    store = written(weights, chat, prompts, 60)
    user_turns = greedy = 0
    for index in range(60):
        tokens, roles, hidden = turns_of(store, index)
        assert tokens[: len(chat.prefix)].tolist() == chat.prefix
        states = hidden_of(model, tokens)
        torch.testing.assert_close(hidden[:-1], states[:-1], rtol=1e-3, atol=1e-3)
        replies = (roles[1:] == REPLY).nonzero()[:, 0]
        likeliest = model.lm_head(states[replies]).argmax(-1)
        greedy += bool((likeliest == tokens[replies + 1]).all())
        user_turns += int((roles == USER).any())
        ends = (roles[:-1] == USER) & (roles[1:] == FORCED)
        for end in ends.nonzero()[:, 0].tolist():
            following = tokens[end : end + len(chat.to_reply)].tolist()
            assert following == chat.to_reply[: len(following)]
    assert 10 < user_turns < 40
    assert 40 < greedy < 60  # one reply in five of half of the rows is drawn


def test_a_row_that_is_done_changes_nothing_more(weights, chat, prompts) -> None:
    conversations = Conversations(weights, chat, CONFIG)
    queue, every = Prompts(prompts, torch.device("cpu")), torch.arange(CONFIG.rows)
    conversations.begin(every, *queue.take(torch.zeros(CONFIG.rows, dtype=torch.bool)))
    rows = conversations.rows
    while not rows.done.all():
        conversations.step()
    kept = rows.tokens.clone(), rows.roles.clone(), rows.length.clone(), rows.position.clone()
    conversations.step()
    assert all(map(torch.equal, kept, (rows.tokens, rows.roles, rows.length, rows.position)))
    conversations.begin(every[:2], *queue.take(torch.zeros(2, dtype=torch.bool)))
    assert rows.done.tolist() == [False] * 2 + [True] * 4


def test_a_loop_is_cut_where_it_began(weights, chat, prompts, monkeypatch) -> None:
    """A reply of one token over and over: its 24 last 4-grams go, and what is left is too short."""
    conversations = Conversations(weights, chat, GenerateConfig(rows=2, max_length=128))
    again = torch.full((2,), WORDS.index("x"))
    monkeypatch.setattr(conversations, "_sample", lambda hidden, user: again)
    none = torch.zeros(2, dtype=torch.bool)
    conversations.begin(torch.arange(2), *Prompts(prompts, torch.device("cpu")).take(none))
    rows = conversations.rows
    while not rows.done.all():
        conversations.step()
    # The 5th token ends the first 4-gram that was there before, the 20th the 16th.
    assert (rows.position + 2 - rows.stage_start).tolist() == [20, 20]
    assert rows.length.tolist() == [0, 0]
    store = Store(conversations, 1000)
    assert store.add(conversations, torch.arange(2))
    assert not store.starts


def test_hidden_states_of_another_model_are_refused(target, chat, prompts) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    store = write(target, tokenizer, prompts, CONFIG, 3000, SECONDS)
    assert check(target, store) < 0.05
    store.hidden = store.hidden.roll(1, 0)
    with pytest.raises(ValueError, match="from the model's own"):
        check(target, store)


def test_evaluation_prompts_and_repeated_turns_are_dropped(weights, chat, prompts) -> None:
    store = written(weights, chat, prompts, 60)
    store.drop(set(), lambda ids: "".join(chr(97 + one) for one in ids) * 8)
    before = len(store.starts)
    assert store.drop(set(), lambda ids: "the same for all")
    own = before - len(store.starts) + 1
    assert store.drop({"thesameforall"}, lambda ids: "the same for all") == 1
    assert len(store.starts) == before - own


def test_the_command_leaves_layers_that_can_be_served(target, prompts, tmp_path) -> None:
    folder = tmp_path / "target"
    export(target, new_layer(target, 0), folder)
    (tmp_path / "held-out.json").write_text('[{"domain": "x", "prompt": "the a"}]')
    arguments = {
        "target": folder,
        "prompts": prompts,
        "exclude": tmp_path / "held-out.json",
        "out": tmp_path / "out",
        "rows": 16,
        "tokens": 3000,
        "train-seconds": 2,
        "tokens-per-batch": 400,
        "loss-vocabulary": 8,
        "left-out": 5,
        "list-size": 9,
    }
    words = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    app = typer.Typer()
    app.command()(card.main)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    losses = [json.loads(line)["losses"] for line in (tmp_path / "out" / "log.jsonl").open()]
    assert report["steps"] == len(losses) > 0
    layer = load_file(tmp_path / "out" / f"mtp-{report['steps']}.safetensors")
    begun = load_file(folder / "model.safetensors")
    assert set(layer) < set(begun)
    assert any(not torch.equal(layer[name], begun[name]) for name in layer)
    assert len(load_file(tmp_path / "out" / "left_out.safetensors")["lengths"]) == 5
    listed = read_draft_vocabulary(tmp_path / "out", target.model_config.vocab_size)
    assert listed is not None and len(listed) == 9


def test_the_list_of_draft_tokens_counts_what_the_model_wrote(weights, chat, prompts) -> None:
    store = written(weights, chat, prompts, 30)
    tokens, trained, _ = store.padded(list(range(len(store.starts))))
    counts = Counter(tokens[trained].tolist())
    assert store.counts(50).tolist() == [counts[token] for token in range(50)]
