"""SGLang's norms, rotations and activations on CPU are this package's, and compute what SGLang's
own expressions do; what a body here does not compute stays with SGLang.

The oracle is each layer's own ``forward_native``.
"""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.sglang

# float32 sums in another order.
CLOSE = {"rtol": 2.0**-19, "atol": 2.0**-19}


@pytest.fixture
def layers():
    from sglang.srt.platforms import current_platform

    from sglang_ascend.plugin.cpu import layers

    current_platform.init_backend()
    return layers


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rms_norm(**settings):
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(48, eps=1e-5, **settings)
    norm.weight.data = noise(48, seed=9)
    return norm


def rotation(*, head_size: int = 16, rotary_dim: int = 16, is_neox_style: bool = True):
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding(head_size, rotary_dim, 64, 10_000, is_neox_style, torch.float32)


def latent_rotation():
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    return DeepseekScalingRotaryEmbedding(16, 16, 64, 10_000, False, 4.0, torch.float32)


def activation():
    from sglang.srt.layers.activation import SiluAndMul

    return SiluAndMul()


CALLS = {
    "norm": (rms_norm, {}, (noise(3, 48),)),
    "norm of a sum": (rms_norm, {}, (noise(3, 48), noise(3, 48, seed=1))),
    "rotation": (rotation, {}, (torch.tensor([5, 0, 62]), noise(3, 64), noise(3, 32))),
    "rotation of a part": (
        rotation,
        {"rotary_dim": 8},
        (torch.tensor([5, 0, 62]), noise(3, 64), noise(3, 32)),
    ),
    "rotation of neighbours": (
        latent_rotation,
        {},
        (torch.tensor([5, 0, 62]), noise(3, 4, 20)[..., 4:], noise(3, 1, 16)),
    ),
    "activation": (activation, {}, (noise(3, 96),)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_layer_gives_what_sglangs_own_expression_gives(layers, call):
    make, settings, inputs = CALLS[call]
    layer = make(**settings)
    method = layer._resolve_forward_method()
    assert method.__module__ == layers.__name__
    found, expected = method(*inputs), layer.forward_native(*inputs)
    assert_close(found, expected, **CLOSE)
    astray = method(*(x + 1 for x in inputs))
    with pytest.raises(AssertionError):
        assert_close(astray, expected, **CLOSE)


KEPT = {
    "rounded before the weight": (rms_norm, {"cast_x_before_out_mul": True}, (noise(3, 48),)),
    "a residual in float32": (rms_norm, {"fp32_residual": True}, (noise(3, 48),)),
    "a variance of some columns": (rms_norm, {"var_hidden_size": 8}, (noise(3, 48),)),
    "a second residual": (rms_norm, {}, (noise(3, 48), noise(3, 48), noise(3, 48))),
    "interleaved pairs": (
        rotation,
        {"is_neox_style": False},
        (torch.tensor([1]), noise(1, 64), noise(1, 32)),
    ),
    "shifted positions of neighbours": (
        latent_rotation,
        {},
        (torch.tensor([1]), noise(1, 4, 16), noise(1, 1, 16), torch.tensor([2])),
    ),
    "shifted positions": (
        rotation,
        {},
        (torch.tensor([1]), noise(1, 64), noise(1, 32), torch.tensor([2])),
    ),
}


@pytest.mark.parametrize("call", KEPT)
def test_a_setting_that_is_not_computed_here_stays_with_sglang(layers, call):
    make, settings, inputs = KEPT[call]
    layer = make(**settings)
    layer.forward_native = MethodType(lambda *args: "SGLang's own", layer)
    assert layer._resolve_forward_method()(*inputs) == "SGLang's own"


def test_a_layer_of_another_kind_stays_with_sglang(layers):
    from sglang.srt.layers.layernorm import GemmaRMSNorm

    assert GemmaRMSNorm(48)._resolve_forward_method().__module__ != layers.__name__
