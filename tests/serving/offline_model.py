"""transformers' model in float64 over decoded weights; quantized linears round their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType

import torch
from launched_server import Reply
from quantized_checkpoints import LAYOUTS, Kind, is_quantized
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM

# As the issue of quantized serving asks of nano-deepseek with int8 inputs.
MAX_KL = 2e-4
# A layer's sums in float32, which round some tens of times; and changes by as much that are tried.
OFF_IN_FLOAT32, NUM_SEEDS = 2.0**-20, 4
# What a server is asked for: the distribution of every row, of the prompt and of the reply.
ALL_ROWS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4096}

Rounding = Callable[[Tensor], Tensor]


class OfflineModel:
    """Of a checkpoint of ``write_decoded`` and its layout."""

    def __init__(self, decoded: Path, layout: str) -> None:
        self.model = DeepseekV3ForCausalLM.from_pretrained(
            decoded, dtype=torch.float32, attn_implementation="eager"
        ).double()
        self.model.eval()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight", layout):
                _round_input(module, LAYOUTS[layout].kind(name))
            elif name.endswith(".experts"):
                module.forward = MethodType(_experts_of(LAYOUTS[layout].experts), module)

    @contextmanager
    def scales_off_by_one_row(self) -> Iterator[None]:
        """In one projection, whose scale of a row is its largest value by the largest code."""
        weight = self.model.model.layers[1].self_attn.o_proj.weight
        scale = weight.detach().abs().amax(1, keepdim=True)
        with _multiplied(weight, scale.roll(1, 0) / scale):
            yield

    @contextmanager
    def off_as_in_float32(self, seed: int) -> Iterator[None]:
        """Its embedding, by as much as a layer's sums are off in float32."""
        weight = self.model.model.embed_tokens.weight
        generator = torch.Generator().manual_seed(seed)
        off = OFF_IN_FLOAT32 * torch.randn(weight.shape, generator=generator)
        with _multiplied(weight, 1 + off):
            yield

    def decides(self, prompt: Sequence[int], reply: Reply) -> bool:
        """Whether what float32 is off changes the reply's distributions by less than MAX_KL. An
        input that lies between two codes turns over by it, which with few codes is much, and stays
        in the cache."""
        tokens = [*prompt, *reply.tokens]
        expected, changed = self.logprobs(tokens), []
        for seed in range(NUM_SEEDS):
            with self.off_as_in_float32(seed):
                changed.append(self.logprobs(tokens))
        return all(mean_kl([(other, expected)]) < MAX_KL for other in changed)

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """float64 [len(tokens), vocab_size]: row i is of what follows token i."""
        return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].double(), dim=-1)

    def rows_of(self, prompt: Sequence[int], reply: Reply) -> tuple[Tensor, Tensor]:
        """Every row [rows, vocab_size] that the server gave of this reply, and the offline one."""
        expected = self.logprobs([*prompt, *reply.tokens])
        num_output, num_prompt = len(reply.tokens), len(reply.prompt_logprobs.tokens)
        last = len(expected) - 1 - num_output
        expected = expected[last - num_prompt : last + num_output]
        found = torch.empty_like(expected)
        for row, top in zip(
            found, [*reply.prompt_logprobs.top, *reply.output_logprobs.top], strict=True
        ):
            assert len(top) == len(row)
            row[list(top)] = torch.tensor(list(top.values()), dtype=torch.float64)
        return found, expected


@contextmanager
def _multiplied(weight: nn.Parameter, by: Tensor) -> Iterator[None]:
    original = weight.detach().clone()
    weight.data.mul_(by)
    try:
        yield
    finally:
        weight.data.copy_(original)


def mean_kl(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """KL(served || offline) over all rows, nats."""
    served, offline = (torch.cat(rows) for rows in zip(*pairs, strict=True))
    return float((served.exp() * (served - offline)).sum(-1).mean())


def largest_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Over the log-probabilities of all tokens."""
    return max(float((served - offline).abs().max()) for served, offline in pairs)


def _round_input(linear: nn.Linear, kind: Kind) -> None:
    if (rounding := kind.round_input) is not None:
        linear.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))


def _experts_of(kind: Kind) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    rounding = kind.round_input or (lambda x: x)

    def forward(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for expert, (gate_up, down) in enumerate(
            zip(self.gate_up_proj, self.down_proj, strict=True)
        ):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (rounding(hidden[rows]) @ gate_up.T).chunk(2, dim=-1)
            output = rounding(nn.functional.silu(gate) * up) @ down.T
            total.index_add_(0, rows, output * weights[rows, place, None])
        return total

    return forward
