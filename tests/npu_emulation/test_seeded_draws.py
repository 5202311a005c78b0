"""A request's seed draws the CPU's tokens on an NPU, where torch_npu casts float64 to float32.

In float32 a hash near 2^32 is 1, and its token would win whatever its probability.
"""

from __future__ import annotations

import inspect

import torch

from sglang_ascend.ops import sampling
from sglang_ascend.sampling.noise import Decision, uniform

# The hash of these is 88 below 2^32.
SEED, POSITION, TOKEN = 7, 3581, 3960
NUM_ROWS, VOCABULARY = 20, 4096


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of which the first has that seed and position, and makes that token unlikely."""
    logprobs = torch.randn(NUM_ROWS, VOCABULARY)
    logprobs[0, TOKEN] = -12.0
    seeds, positions = SEED + torch.arange(NUM_ROWS), POSITION + 5 * torch.arange(NUM_ROWS)
    return logprobs.log_softmax(-1), seeds, positions


def test_seeds_draw_what_they_draw_in_float64(numerics, monkeypatch):
    from sglang.srt.layers import sampler

    from sglang_ascend.plugin.requests.seeds import draw

    monkeypatch.setattr(sampler, "murmur_hash32", sampling.murmur_hash32)
    in_float64 = inspect.unwrap(sampler.multinomial_with_seed)
    drawn_from = rows()
    wanted = in_float64(*drawn_from)
    on_device = [tensor.to("npu") for tensor in drawn_from]
    logprobs, seeds, positions = on_device
    assert torch.equal(draw(logprobs.exp(), seeds, positions).cpu().long(), wanted[:, 0])
    assert wanted[0] != TOKEN
    assert in_float64(*on_device)[0].item() == TOKEN


def test_a_uniform_number_is_below_1(numerics, monkeypatch):
    hashed = torch.full((1, 1), 2**32 - 1).to("npu")
    monkeypatch.setattr(sampling, "murmur_hash32", lambda *key: hashed)
    zero = torch.zeros(1, dtype=torch.int64).to("npu")
    assert uniform(zero, zero, Decision.ACCEPT).item() < 1
    assert (hashed.double() / 2**32).item() == 1
