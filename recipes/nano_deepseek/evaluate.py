"""Owns nano-deepseek's acceptance table: unseen questions and text, greedy and at temperature 1.

A greedy draft is accepted under sampling exactly as often as the sampled token equals it.
"""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoTokenizer

from recipes.nano_deepseek.generate import MAX_NEW_TOKENS, corpus_prompts
from recipes.nano_deepseek.text.questions import draw_questions
from recipes.nano_deepseek.text.tokenizer import END_ID
from sglang_ascend.training.acceptance import Output, evaluate
from sglang_ascend.training.generation.outputs import chat_prompts, continue_prompts
from sglang_ascend.training.generation.prompt_files import read_prompts
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import own_layer

TEXT_DOMAINS = {"prose": "austen", "code": "python_code"}
TEXT_PROMPTS = 32
SEED = 5


def question_prompts(folder: Path, questions: Path) -> tuple[str, list[list[int]]]:
    """The file's one domain and its questions as token ids in the chat template of `folder`."""
    rows = read_prompts(questions)
    (domain,) = {row["domain"] for row in rows}
    return domain, chat_prompts(AutoTokenizer.from_pretrained(folder), rows)


def run_prompts(
    target: Target, domain: str, prompts: list[list[int]], temperature: float
) -> list[Output]:
    """Continue every prompt."""
    generator = torch.Generator().manual_seed(SEED)
    temperatures = torch.full((len(prompts),), temperature)
    rows = continue_prompts(target, prompts, [END_ID], MAX_NEW_TOKENS, temperatures, generator)
    return [
        Output(domain, tokens, len(prompt), hidden)
        for prompt, (tokens, hidden) in zip(prompts, rows, strict=True)
    ]


def right_answers(folder: Path, outputs: list[Output]) -> float:
    """Share of maths outputs whose final number is the template's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = dict(draw_questions("maths").held_out)
    right = 0
    for output in outputs:
        text = tokenizer.decode(output.tokens.tolist())
        match = re.search(r"<\|user\|>(.*?)<\|assistant\|>(.*?)<\|end\|>", text, re.DOTALL)
        if match:
            final = wanted[match[1]].rsplit("####", 1)[1].strip()
            right += match[2].endswith(f"#### {final}")
    return round(right / len(outputs), 3)


def acceptance_table(
    target: Target,
    prompts: dict[str, list[list[int]]],
    temperature: float,
) -> tuple[dict, list[Output]]:
    """`acceptance.evaluate` over all domains at one temperature, and the outputs it read."""
    outputs = [
        output
        for domain, rows in prompts.items()
        for output in run_prompts(target, domain, rows, temperature)
    ]
    return evaluate(own_layer(target), outputs, *target.embedding_and_head(), num_steps=3), outputs


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of nano-deepseek.")],
    questions: Annotated[list[Path], typer.Option(help="Held-out question files; repeatable.")],
    corpus: Annotated[Path | None, typer.Option(help="Adds prose and code prompts.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Print acceptance length by domain, lookup baseline, loop share and right answers as JSON."""
    torch.set_num_threads(threads)
    target = Target.open(checkpoint)
    prompts = dict(question_prompts(checkpoint, path) for path in questions)
    if corpus is not None:
        rng = np.random.default_rng(SEED)
        for domain, part in TEXT_DOMAINS.items():
            source = corpus_prompts(corpus, "val", part, rng)
            prompts[domain] = list(islice(source, TEXT_PROMPTS))
    greedy, outputs = acceptance_table(target, prompts, 0.0)
    maths = [output for output in outputs if output.domain == "maths"]
    report = {
        "greedy": greedy,
        "temperature 1": acceptance_table(target, prompts, 1.0)[0],
        "maths answers right": right_answers(checkpoint, maths),
    }
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
