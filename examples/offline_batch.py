"""Generate offline with ``sgl.Engine``, no server.

python examples/offline_batch.py --model-path "$(sglang-ascend model-path smollm2-mtp)"
"""

from __future__ import annotations

from typing import Annotated

import sglang as sgl
import typer

PROMPTS = (
    "Write a Python function that reverses a string.",
    "Explain why the sky is blue.",
    "What is 17 + 25?",
)


def main(
    model_path: Annotated[str, typer.Option(help="A checkpoint folder with an MTP layer.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest reply, in tokens.")] = 64,
    dtype: Annotated[str, typer.Option(help="What SGLang's --dtype takes.")] = "auto",
) -> None:
    """Answer three prompts in one batch and print how many tokens each target forward gave."""
    engine = sgl.Engine(model_path=model_path, speculative_algorithm="MTP", dtype=dtype)
    try:
        tokenizer = engine.tokenizer_manager.tokenizer
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens}
        for prompt, reply in zip(PROMPTS, engine.generate(prompts, parameters), strict=True):
            print(f"> {prompt}\n{reply['text'].strip()}")
            # A reply of one token is the prefill's, and SGLang says nothing of drafts.
            print(f"[accept length {reply['meta_info'].get('spec_accept_length', 1.0):.2f}]\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    typer.run(main)
