"""50 prompts by each deployment of several processes on emulated NPUs: whatever they share or send
each other, each request has transformers' greedy tokens in every rank that serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from greedy_oracle import Oracle
from serving.eight_heads import write_with_eight_heads

from npu_emulation.attention_waves import in_turn
from npu_emulation.mtp_runs import MTP, SHORT_CONTEXT, tokens_per_step
from npu_emulation.sglang_runs import FUSED_ATTENTION, prompt, served
from npu_emulation.test_attention_ranks import TWO
from npu_emulation.test_expert_parallel import DEEPEP, ENVIRON
from npu_emulation.test_mtp_fifty_prompts import MAX_SECONDS, NUM_PROMPTS, NUM_TOKENS, prompts_of
from npu_emulation.test_two_servers import APART
from sglang_ascend.models.catalog import model_path

GRAPH_OF_8 = ("--cuda-graph-bs-decode", "8")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAX_SECONDS + 600)]


@dataclass(frozen=True)
class Deployment:
    flags: tuple[str, ...]
    environ: dict[str, str]
    num_groups: int = 1  # of ranks with requests of their own


DEPLOYMENTS = {
    "experts": Deployment(DEEPEP, ENVIRON),
    "data-parallel attention": Deployment(TWO, FUSED_ATTENTION, num_groups=2),
    "four ranks": Deployment(("--tp-size", "4"), FUSED_ATTENTION),
    "two servers": Deployment(APART, FUSED_ATTENTION),
}
SERVED = [
    *((deployment, "random") for deployment in DEPLOYMENTS),
    ("experts", "nano-deepseek"),
    ("data-parallel attention", "nano-deepseek"),
    ("four ranks", "eight heads"),  # nano-deepseek's, for four do not divide its six
    # test_two_servers.py has nano-deepseek and the two servers, with their budget.
]


@pytest.mark.parametrize(("deployment", "model"), SERVED)
def test_fifty_prompts_have_transformers_tokens(deployment, model, guessable: Path, tmp_path: Path):
    how, nano = DEPLOYMENTS[deployment], model_path("nano-deepseek")
    if model == "random":
        folder, prompts = guessable, [prompt(5 + 2 * seed, seed) for seed in range(NUM_PROMPTS)]
    else:
        is_nano = model == "nano-deepseek"
        folder = nano if is_nano else write_with_eight_heads(nano, tmp_path / "eight-heads")
        prompts = prompts_of(nano)
    wave = in_turn(prompts, how.num_groups, NUM_TOKENS)
    flags = (*how.flags, *GRAPH_OF_8, *MTP, *SHORT_CONTEXT)
    report = served(folder, [wave], flags, how.environ, timeout=MAX_SECONDS)
    oracle = Oracle(folder)
    for rank, each in enumerate([report, *report.other_ranks]):
        own = prompts[rank :: how.num_groups] if how.num_groups > 1 else prompts
        assert [len(tokens) for tokens in each.tokens] == [NUM_TOKENS] * len(own)
        said = oracle.summary(own, each.tokens)
        print(f"{deployment}, {model}, rank {rank}: {said}; {tokens_per_step(each):.2f} a step")
        oracle.check_greedy(own, each.tokens)
