"""Owns nano-deepseek's byte-level BPE tokenizer: special tokens, chat template, files, encoding."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
BOS, END, USER, ASSISTANT, SYSTEM, PAD = (
    "<|bos|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (BOS, END, USER, ASSISTANT, SYSTEM, PAD)
BOS_ID, END_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID, PAD_ID = range(len(SPECIAL_TOKENS))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Words, single digits (so that sums can be learned column by column), punctuation, line ends.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SAMPLE_BYTES = 1_200_000


def train_tokenizer(corpus: Path) -> PreTrainedTokenizerFast:
    """Train on up to `SAMPLE_BYTES` of every part's training text in `corpus`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _sample(corpus: Path) -> list[str]:
    sample = []
    for path in sorted(corpus.glob("*.train.json")):
        size = 0
        for document in json.loads(path.read_text(encoding="utf-8")):
            sample.append(document)
            size += len(document.encode())
            if size > SAMPLE_BYTES:
                break
    return sample


def encode_corpus(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Write `<part>.<split>.npy` (uint16, every document opened by BOS); return tokens per part."""
    sizes = {}
    for path in tqdm(sorted(corpus.glob("*.*.json")), desc="encode"):
        documents = json.loads(path.read_text(encoding="utf-8"))
        encoded = tokenizer.backend_tokenizer.encode_batch(documents, add_special_tokens=False)
        tokens = [token for part in encoded for token in (BOS_ID, *part.ids)]
        np.save(path.with_suffix(".npy"), np.array(tokens, dtype=np.uint16))
        sizes[path.stem] = len(tokens)
    return sizes


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` that transformers 4 and 5 both load."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(
    corpus: Annotated[Path, typer.Option(help="Folder written by text.corpus.")],
    out: Annotated[Path, typer.Option(help="Where the tokenizer files go.")],
) -> None:
    """Train the tokenizer and encode the corpus."""
    tokenizer = train_tokenizer(corpus)
    save_tokenizer(tokenizer, out)
    for name, tokens in encode_corpus(corpus, tokenizer).items():
        typer.echo(f"{name:20} {tokens:9} tokens")


if __name__ == "__main__":
    typer.run(main)
