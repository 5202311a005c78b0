"""Invariant: the commands of docs/train-your-own.md take a Llama made here to a server whose
greedy replies are that Llama's own, in fewer forwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from documented_commands import ROOT, commands_of
from launched_server import LaunchedServer, ServerConfig
from tiny_targets import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAGE = ROOT / "docs" / "train-your-own.md"
TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")  # a text that stays as it is
QUESTIONS = ["What is a seed?", "Which penalties are there?", "Is a draft a token?", "Why?"]
# The page's defaults take hours.
SHORT = "--tokens 1500 --max-steps 40 --max-length 160 --max-new-tokens 48 --vocabulary 256"
SHORT += " --own-share 0 --threads 1 --prompts prompts.jsonl"


def documented(beginning: str) -> str:
    """The one command of the page that begins so."""
    commands = list(dict.fromkeys(commands_of(PAGE.read_text(encoding="utf-8"))))
    (found,) = [command for command in commands if command.startswith(beginning)]
    return found


def run(line: str, folder: Path) -> str:
    """`line` in `folder`, by this Python's programs."""
    line = re.sub(r"^(sglang-ascend)", f"{sys.executable} -m sglang_ascend", line)
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the newcomer works: a Llama and prompts."""
    folder = tmp_path_factory.mktemp("newcomer")
    words = re.findall(r"\w+", TEXT)
    pairs = zip(words[:200], words[7:207], strict=True)
    asked = [f"What is {word} {other}?" for word, other in pairs]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": one}) for one in asked))
    write_llama(folder / "my-llama")
    return folder


def write_llama(folder: Path) -> None:
    """A Llama of 150 thousand weights with a byte-level tokenizer, trained for seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.tensor(tokenizer.encode(TEXT).ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        starts = torch.randint(len(ids) - 64, (8,))
        batch = torch.stack([ids[start : start + 64] for start in starts.tolist()])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bfloat16().save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder that the page's first command writes, and all of the page's names in it."""
    command = documented("sglang-ascend train-mtp my-llama --out my-llama-mtp --prompts")
    run(f"{command} {SHORT}", folder)
    for name in re.findall(r"`(my-llama-mtp/[\w./-]+)`", PAGE.read_text(encoding="utf-8")):
        assert (folder / name).exists(), name
    return folder / "my-llama-mtp" / "model"


@pytest.fixture(scope="module")
def server(folder: Path, trained: Path, tmp_path_factory) -> Iterator[LaunchedServer]:
    """The page's server, in float32 so that the oracle can tell every token."""
    line = documented("python -m sglang.launch_server").replace("python", sys.executable, 1)
    program = ("bash", "-c", f'cd {folder} && exec {line} "$@"', "bash")
    config = ServerConfig(trained, mtp=True, program=program)
    started = LaunchedServer(config, tmp_path_factory.mktemp("server") / "log")
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.stop()


@pytest.mark.sglang
def test_what_the_page_trains_is_served_and_says_what_the_llama_says(folder, server) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "my-llama")
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        tokenizer(tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True))
        for t in turns
    ]
    prompts = [prompt.input_ids for prompt in prompts]
    sampling = {"temperature": 0, "max_new_tokens": 40}
    replies = server.generate(prompts, sampling)
    llama = transformers.LlamaForCausalLM.from_pretrained(
        folder / "my-llama", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for prompt, reply in zip(prompts, replies, strict=True):
            logits = llama(torch.tensor([[*prompt, *reply.tokens]])).logits[0]
            assert reply.tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
            # Control: one token later the same rows say something else.
            assert reply.tokens != logits.argmax(-1)[len(prompt) :].tolist()
    made = sum(len(reply.tokens) for reply in replies)
    forwards = sum(reply.meta["spec_verify_ct"] for reply in replies)
    print(f"{made} tokens in {forwards} forwards of the target")
    assert forwards < 0.9 * made


@pytest.mark.sglang
@pytest.mark.slow
def test_the_pages_measurement_compares_the_folder_with_and_without_mtp(folder, trained) -> None:
    few = "--task qa --num-prompts 1 --max-new-tokens 16"
    run(f"{documented('sglang-ascend bench --model my-llama-mtp')} {few}", folder)
    report = json.loads((folder / "my-llama-bench.json").read_text())
    # A reply of this Llama may loop, and the task's mean leaves such a round out.
    (one,) = report["rounds"]
    samples = one["samples"]
    assert len(samples) == 2
    assert len({sample["tokens"] for sample in samples.values()}) == 1
    assert [sample["histogram"] is None for sample in samples.values()].count(True) == 1
