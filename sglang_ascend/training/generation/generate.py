"""Shards of what a `Generator` writes, until they hold enough; resumed behind the last whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from sglang_ascend.training.generation.conversation import FORCED
from sglang_ascend.training.generation.generator import MAX_DROPPED, GenerateConfig, Generator
from sglang_ascend.training.generation.origin import checked_fingerprint
from sglang_ascend.training.generation.prompts import prompt_key
from sglang_ascend.training.generation.shards import read_prompt_list, read_shard, write_shard
from sglang_ascend.training.targets.families import Target


class Shortfall(NamedTuple):
    """What is to be said of what was not written, a sentence each; "" where there is nothing."""

    too_long: str = ""  # of prompts that were left out
    ran_dry: str = ""  # of a target that has no more to say
    ran_out: str = ""  # of prompts that are fewer than asked for


def generate_shards(
    target: Target,
    out: Path,
    config: GenerateConfig,
    excluded: set[str],
    num_tokens: int,
    prompts: Sequence[str] | None = None,
) -> Shortfall:
    """Adds shards of `config.seed` to `out` until that seed's hold `num_tokens` sampled tokens, or
    `prompts` has none left, or the target ran dry; without `prompts` the templates give them.

    After a kill the same call goes on behind the last whole shard, with a fresh random state. What
    shards of any seed have answered is not asked again.

    Raises:
        ValueError: another target wrote shards of `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    every = sorted(out.glob("shard-*.safetensors"))
    own = checked_fingerprint(target, every)
    done = sorted(out.glob(f"shard-{config.seed:03d}-*.safetensors"))
    counted = sum(int((read_shard(path)["roles"] != FORCED).sum()) for path in done)
    if counted >= num_tokens:
        return Shortfall()
    answered = {prompt for path in every for prompt in read_prompt_list(path)}
    if prompts is not None:  # 2 + 1 is not 2 - 1, which have one key
        left = (prompt for prompt in prompts if prompt not in answered)
        prompts = [prompt for prompt in left if prompt_key(prompt) not in excluded]
    excluded = excluded | set(map(prompt_key, answered))
    number = 1 + int(done[-1].stem.rpartition("-")[2]) if done else 0
    generator = Generator(target, config, excluded, number, prompts)
    with tqdm(desc="generate", total=num_tokens, initial=counted, unit="token") as bar:
        conversations = generator.run()
        while finished := list(islice(conversations, config.sequences_per_shard)):
            path = out / f"shard-{config.seed:03d}-{number:05d}.safetensors"
            written = write_shard(path, finished, own)
            number, counted = number + 1, counted + written
            bar.set_postfix(kept=generator.num_kept, dropped=generator.num_dropped)
            bar.update(written)
            if counted >= num_tokens:
                break
    too_long = ran_dry = ran_out = ""
    if prompts is not None and generator.num_too_long:
        too_long = (
            f"{generator.num_too_long:,} prompts are too long and were left out: of the "
            f"{config.max_length} tokens of prompt and reply a prompt may have {generator.room}."
        )
    if generator.ran_dry:
        ran_dry = (
            f"The target wrote {counted:,} of {num_tokens:,} tokens and nothing new in its last "
            f"{MAX_DROPPED} conversations: a smaller --own-share lets it answer more other prompts."
        )
    elif counted < num_tokens:
        ran_out = f"--prompts gave {counted:,} of {num_tokens:,} tokens: more of them give more."
    return Shortfall(too_long, ran_dry, ran_out)
