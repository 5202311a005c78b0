"""An MTP layer drafts without SGLang's modules only where all that they compute is computed here.

That it then gives their bits is shown in servers (``tests/serving/test_short_drafts.py``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sglang


def made(kind: type[torch.nn.Module], **attributes):
    """Of a class whose constructor asks for a server's configuration."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def processor(**settings):
    from sglang.srt.layers.logits_processor import LogitsProcessor

    return made(
        LogitsProcessor, **{"use_fp32_lm_head": False, "rl_on_policy_target": None} | settings
    )


def rotation():
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return made(RotaryEmbedding)


def latent_rotation(is_neox_style: bool = False):
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    return made(DeepseekScalingRotaryEmbedding, is_neox_style=is_neox_style)


def mimo(rotary_emb):
    from sglang.srt.models.mimo_mtp import MiMoMTP

    block = SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=rotary_emb))
    return made(MiMoMTP, model=SimpleNamespace(mtp_block=block), logits_processor=processor())


def nextn(rotary_emb, **settings):
    """DeepSeek-V3's, but for ``settings`` of its attention."""
    from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN

    half = torch.zeros(1)
    of_deepseek = {"fused_qkv_a_proj_with_mqa": 1, "use_dsa": False, "w_kc": half, "w_vc": half}
    attention = SimpleNamespace(rotary_emb=rotary_emb, **of_deepseek | settings)
    layer = SimpleNamespace(
        decoder=SimpleNamespace(self_attn=attention), eh_proj=torch.nn.Linear(1, 1)
    )
    return made(DeepseekV3ForCausalLMNextN, model=layer, logits_processor=processor())


@pytest.fixture
def serves():
    from sglang.srt.runtime_context import get_parallel

    from sglang_ascend.plugin.cpu.latent_drafts import NextNDrafts
    from sglang_ascend.plugin.cpu.layers import MimoDrafts

    drafts = {kind.__name__: kind for kind in (MimoDrafts, NextNDrafts)}

    def asked(kind: str, model: torch.nn.Module, tp_size: int = 1) -> bool:
        with get_parallel().override(tp_size=tp_size):
            return drafts[kind].serves(model)

    return asked


@pytest.mark.parametrize(
    ("kind", "make", "rotate", "other"),
    [
        ("MimoDrafts", mimo, rotation, latent_rotation),
        ("NextNDrafts", nextn, latent_rotation, rotation),
    ],
)
def test_a_whole_layer_of_its_kind_is_served(serves, kind, make, rotate, other):
    assert serves(kind, make(rotate()))
    assert not serves(kind, make(rotate()), tp_size=2)
    assert not serves(kind, make(other()))
    model = make(rotate())
    model.logits_processor = processor(use_fp32_lm_head=True)
    assert not serves(kind, model)
    assert not serves(kind, torch.nn.Module())


def test_latent_attention_of_another_kind_keeps_sglangs_modules(serves):
    narrow = torch.zeros(1, dtype=torch.float8_e4m3fn)
    for settings in ({"use_dsa": True}, {"w_kc": narrow}, {"w_vc": narrow}):
        assert not serves("NextNDrafts", nextn(latent_rotation(), **settings))
    assert not serves("NextNDrafts", nextn(latent_rotation(is_neox_style=True)))
    whole_queries: Any = nextn(latent_rotation())
    del whole_queries.model.decoder.self_attn.fused_qkv_a_proj_with_mqa
    assert not serves("NextNDrafts", whole_queries)
