"""A draft vocabulary by language changes no reply, routes each request, and keeps its acceptance.

nano-deepseek answers in English, in Chinese and with sums; its lists are counted from its own
replies to half of the held-out prompts, and the other half is asked.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from server_pairs import (
    TEST_TIMEOUT_S,
    ask_both,
    broken_verifier,
    plain_and_mtp,
    tokens_per_step,
)
from server_pool import ServerPool
from serving_prompts import conversation
from test_sampling_distribution import (
    ALLOWED,
    MAX_P_BROKEN,
    NUM_DRAWS,
    QUESTION,
    REJECTION,
    Cells,
    check_distribution,
    p_of,
    token_of,
)
from watched_acceptance import with_parts

from sglang_ascend.speculative.vocabulary.file import FILE_NAME, read_vocabulary
from sglang_ascend.speculative.vocabulary.languages import LanguageTracker, evidence
from sglang_ascend.training.vocabulary.build import Builder
from sglang_ascend.training.vocabulary.sources import Source

LANGUAGES = ("english", "chinese", "sums")
SIZE = 512  # of 4,096 tokens
NUM_ASKED = 8  # of each language
VOCAB_SIZE = 4096

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


def language_of(prompt: str) -> str:
    if not prompt.isascii():
        return "chinese"
    return "english" if sum(map(str.isalpha, prompt)) > 10 else "sums"


@pytest.fixture
def questions(held_out_prompts: dict[str, list[str]]) -> dict[str, list[str]]:
    asked: dict[str, list[str]] = {language: [] for language in LANGUAGES}
    for prompt in (*held_out_prompts["maths"], *held_out_prompts["nano_chat"]):
        asked[language_of(prompt)].append(prompt)
    return asked


@pytest.fixture
def prompts(tokenizer, questions: dict[str, list[str]]) -> dict[str, Prompts]:
    """Of each language those with even numbers, which the lists were not counted from."""
    return {
        language: [conversation(tokenizer, text) for text in texts[0 : 2 * NUM_ASKED : 2]]
        for language, texts in questions.items()
    }


@pytest.fixture(scope="session")
def counted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("by-language") / "nano"


@pytest.fixture
def folder(
    servers: ServerPool, model_folder: Path, counted_folder: Path, tokenizer, questions
) -> Path:
    """The model with the lists that `build-vocabulary` makes of its own replies, built once."""
    if counted_folder.exists():
        return counted_folder
    (plain,) = servers.get(plain_and_mtp(model_folder)[0])
    sources = []
    for language, texts in questions.items():
        asked = [conversation(tokenizer, text) for text in texts[1::2]]
        replies = plain.generate(asked, greedy(48))
        path = counted_folder.parent / f"{language}.jsonl"
        rows = zip(texts[1::2], replies, strict=True)
        path.write_text("\n".join(json.dumps(f"{text}\n{reply.text}") for text, reply in rows))
        sources.append(Source(path, language))
    builder = Builder(model_folder)
    counts, provenance = builder.count(sources, lambda source, num_tokens: None)
    shutil.copytree(model_folder, counted_folder)
    builder.write(counted_folder, counts, provenance, SIZE)
    return counted_folder


def by_language(folder: Path, flags: tuple[str, ...] = ()) -> ServerConfig:
    return plain_and_mtp(folder, mtp_flags=flags)[1]


def languages_along(folder: Path, prompt: list[int], reply: Reply) -> list[str]:
    """The language that the router hears after each token of a reply."""
    vocabulary = read_vocabulary(folder, VOCAB_SIZE)
    assert vocabulary is not None
    names = [*(one.name for one in vocabulary.languages), "none"]
    tracker, row = LanguageTracker(evidence(vocabulary), 1, "cpu"), torch.tensor([0])
    tracker.restart(row, [prompt])
    heard = []
    for token in reply.tokens:
        tracker.advance(row, torch.tensor([[token]]), torch.tensor([1]))
        heard.append(names[int(tracker.likeliest(row))])
    return heard


def test_greedy_replies_do_not_change_where_the_language_does(
    servers: ServerPool, model_folder: Path, folder: Path, tokenizer, prompts, questions
) -> None:
    """Beside replies of one language, those to a question behind turns in another one."""
    turns = [
        conversation(tokenizer, first, first, second)
        for one, other in zip(LANGUAGES, LANGUAGES[1:] + LANGUAGES[:1], strict=True)
        for first, second in zip(questions[one][:4], questions[other][:4], strict=True)
    ]
    asked = [*turns, *(prompt for of in prompts.values() for prompt in of)]
    pair = servers.get(plain_and_mtp(model_folder)[0], by_language(folder))
    plain, drafted = ask_both(pair, lambda server: server.generate(asked, greedy(48)))
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    heard = [
        languages_along(folder, prompt, reply) for prompt, reply in zip(asked, plain, strict=True)
    ]
    switched = sum(len(set(along)) > 1 for along in heard)
    print(f"{switched} of {len(asked)} replies changed their language")
    assert switched >= 5
    assert {along[-1] for along in heard} >= set(LANGUAGES)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["any K"])
def test_languages_keep_their_heads_whatever_k_a_step_has(
    servers: ServerPool, folder: Path, prompts: dict[str, Prompts], variant: str
) -> None:
    """Replies stay the same; where K is always 3, drafts are kept as often as with no choice."""
    fixed = by_language(folder)
    adaptive = by_language(folder, ("--speculative-adaptive",))
    always, varying = (
        with_parts(adaptive, "forced_drafts", FORCED_DRAFTS=forced) for forced in ("3", "random")
    )
    asked = [prompt for of in zip(*prompts.values(), strict=True) for prompt in of]
    found = []
    for config in (fixed, always, varying):
        (server,) = servers.get(config)
        found.append(server.generate(asked, greedy(40)))
    expected, same_k, other_k = found
    assert [r.tokens for r in same_k] == [r.tokens for r in other_k] == [r.tokens for r in expected]
    assert tokens_per_step(same_k) == pytest.approx(tokens_per_step(expected), rel=0.02)


def acceptance(server: LaunchedServer, prompts: Prompts) -> float:
    return tokens_per_step(server.generate(prompts, greedy(40)))


def test_languages_in_one_batch_keep_their_acceptance(
    servers: ServerPool, model_folder: Path, folder: Path, prompts: dict[str, Prompts]
) -> None:
    whole, cut = servers.get(plain_and_mtp(model_folder)[1], by_language(folder))
    mixed = [prompt for of in zip(*prompts.values(), strict=True) for prompt in of]
    replies = cut.generate(mixed, greedy(40))
    for place, (language, alone) in enumerate(prompts.items()):
        together, by_itself = tokens_per_step(replies[place::3]), acceptance(cut, alone)
        full = acceptance(whole, alone)
        print(f"{language}: {together:.2f} in a mixed batch, {by_itself:.2f} alone, {full:.2f}")
        assert together == pytest.approx(by_itself, rel=0.01)
        assert by_itself > 0.9 * full


@pytest.mark.parametrize("mistake", ["draft_in_another_language"])
def test_the_control_the_head_of_another_language_loses_acceptance(
    servers: ServerPool, folder: Path, prompts: dict[str, Prompts], mistake: str
) -> None:
    right, wrong = servers.get(by_language(folder), broken_verifier(folder, mistake))
    asked = [prompt for of in prompts.values() for prompt in of]
    found = [server.generate(asked, greedy(40)) for server in (right, wrong)]
    assert [r.tokens for r in found[0]] == [r.tokens for r in found[1]]
    lengths = [tokens_per_step(replies) for replies in found]
    print(f"tokens per step: {lengths[0]:.2f}, and {lengths[1]:.2f} by the wrong heads")
    assert lengths[1] < 0.9 * lengths[0]


@pytest.fixture
def switching_folder(tmp_path: Path, model_folder: Path, tokenizer) -> Path:
    """Two languages that no prompt tells apart, and each emitted digit does: one drafts 7 and 0,
    the other 5 and 0."""
    seven, five, *others = (token_of(tokenizer, text) for text in ALLOWED)
    common = [token for token in range(64) if token not in (seven, five, *others)]

    def language(name: str, digit: int) -> dict[str, object]:
        counts = {**dict.fromkeys(common, 10), digit: 1000, others[0]: 100}
        return {"name": name, "token_ids": [*counts], "counts": [*counts.values()]}

    folder = shutil.copytree(model_folder, tmp_path / "switching")
    scripts = {"names": ["any"], "of_token": [0] * VOCAB_SIZE}
    content = {"languages": [language("a", seven), language("b", five)], "scripts": scripts}
    (folder / FILE_NAME).write_text(json.dumps(content))
    return folder


@pytest.fixture
def digits(tokenizer) -> Cells:
    return Cells([token_of(tokenizer, text) for text in ALLOWED[:2]], length=5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rejection", "exact match"])
def test_sampled_replies_have_the_models_distribution_where_maps_switch(
    servers: ServerPool,
    model_folder: Path,
    switching_folder: Path,
    reference,
    tokenizer,
    digits: Cells,
    variant: str,
) -> None:
    prompt = conversation(tokenizer, QUESTION)
    flags = REJECTION if variant == "rejection" else ()
    pair = servers.get(plain_and_mtp(model_folder)[0], by_language(switching_folder, flags))
    check_distribution(pair, reference, prompt, digits, "temperature 1", NUM_DRAWS)
    replies = pair[1].generate([prompt] * 64, {"temperature": 1.0, "max_new_tokens": 8})
    assert len(Counter(tuple(reply.tokens) for reply in replies)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["judge_by_other_tokens"])
def test_the_control_distributions_of_other_tokens_are_found(
    servers: ServerPool, switching_folder: Path, reference, tokenizer, digits: Cells, mistake: str
) -> None:
    """As if they were not brought to the target's ids."""
    config = replace(
        broken_verifier(switching_folder, mistake, REJECTION), model_path=switching_folder
    )
    (server,) = servers.get(config)
    prompt = conversation(tokenizer, QUESTION)
    assert p_of(server, reference, prompt, digits) < MAX_P_BROKEN
