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

from sglang_ascend.training.acceptance import Output, evaluate
from sglang_ascend.training.deepseek import DeepseekForCausalLM
from sglang_ascend.training.nano_checkpoint import load_checkpoint
from sglang_ascend.training.nano_generate import (
    Generated,
    corpus_prompts,
    equal_length_batches,
    generate_batch,
)
from sglang_ascend.training.nano_nextn import NextNLayer
from sglang_ascend.training.nano_questions import draw_questions
from sglang_ascend.training.outputs import read_prompts

TEXT_DOMAINS = {"prose": "austen", "code": "python_code"}
TEXT_PROMPTS = 32
SEED = 5


def question_prompts(folder: Path, questions: Path) -> tuple[str, list[list[int]]]:
    """The file's one domain and its questions as token ids in the chat template of `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = read_prompts(questions)
    (domain,) = {row["domain"] for row in rows}
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    return domain, tokenizer(texts, add_special_tokens=False)["input_ids"]


def run_prompts(
    model: DeepseekForCausalLM, domain: str, prompts: list[list[int]], temperature: float
) -> list[Output]:
    """Continue every prompt; outputs come grouped by prompt length."""
    generator = torch.Generator().manual_seed(SEED)
    rows: list[Generated] = []
    for batch in equal_length_batches(prompts):
        temperatures = torch.full((len(batch),), temperature)
        rows += generate_batch(model, batch, temperatures, generator)
    return [
        Output(
            domain,
            torch.tensor(row.tokens),
            row.prompt_length,
            # The last token was never fed: its row is zero.
            torch.nn.functional.pad(row.hidden, (0, 0, 0, 1)),
        )
        for row in rows
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
    model: DeepseekForCausalLM,
    layer: NextNLayer,
    prompts: dict[str, list[list[int]]],
    temperature: float,
) -> tuple[dict, list[Output]]:
    """`acceptance.evaluate` over all domains at one temperature, and the outputs it read."""
    outputs = [
        output
        for domain, rows in prompts.items()
        for output in run_prompts(model, domain, rows, temperature)
    ]
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    return evaluate(layer, outputs, embedding, head, num_steps=3), outputs


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of nano-deepseek.")],
    questions: Annotated[list[Path], typer.Option(help="Held-out question files; repeatable.")],
    corpus: Annotated[Path | None, typer.Option(help="Adds prose and code prompts.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Print acceptance length by domain, lookup baseline, loop share and right answers as JSON."""
    torch.set_num_threads(threads)
    model, layer = load_checkpoint(checkpoint)
    prompts = dict(question_prompts(checkpoint, path) for path in questions)
    if corpus is not None:
        rng = np.random.default_rng(SEED)
        for domain, part in TEXT_DOMAINS.items():
            source = corpus_prompts(corpus, "val", part, rng)
            prompts[domain] = list(islice(source, TEXT_PROMPTS))
    greedy, outputs = acceptance_table(model, layer, prompts, 0.0)
    maths = [output for output in outputs if output.domain == "maths"]
    report = {
        "greedy": greedy,
        "temperature 1": acceptance_table(model, layer, prompts, 1.0)[0],
        "maths answers right": right_answers(checkpoint, maths),
    }
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
