"""A model that SGLang drafts for by an MTP layer is served here, or refused by what it needs."""

from __future__ import annotations

import importlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_ascend.checkpoint.capabilities import (
    AXES,
    BY_NAME,
    INDEXED,
    STATE,
    WINDOW,
    missing_capability,
)
from sglang_ascend.checkpoint.config import ModelConfig
from sglang_ascend.checkpoint.families import FAMILIES
from sglang_ascend.models.catalog import model_path

pytestmark = pytest.mark.sglang
SGLANG = "sglang.srt.configs."
KINDS = ["full_attention", "sliding_attention"]

# What each is known to need, the class that reads its config.json, and fields that its published
# ones have and the class's defaults lack.
ASKING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BailingMoeV2_5ForCausalLM": (
        STATE,
        f"{SGLANG}bailing_hybrid.BailingHybridConfig",
        {"layer_group_size": 8},
    ),
    "BailingMoeV3ForCausalLM": (
        STATE,
        f"{SGLANG}bailing_hybrid.BailingHybridConfig",
        {"layer_group_size": 8},
    ),
    "GigaChat35ForCausalLM": (STATE, f"{SGLANG}gigachat35.GigaChat35Config", {}),
    "Glm5NextForConditionalGeneration": (STATE, f"{SGLANG}glm5_next.Glm5NextConfig", {}),
    "InternS2MobiusForConditionalGeneration": (
        STATE,
        f"{SGLANG}interns2_mobius.InternS2MobiusConfig",
        {},
    ),
    "InternS2PreviewForConditionalGeneration": (
        STATE,
        f"{SGLANG}interns2preview.InternS2PreviewConfig",
        {},
    ),
    "NemotronHForCausalLM": (STATE, f"{SGLANG}nemotron_h.NemotronHConfig", {}),
    "NemotronHPuzzleForCausalLM": (STATE, f"{SGLANG}nemotron_h.NemotronHConfig", {}),
    "NemotronH_Omni_Reasoning_V3": (
        STATE,
        "transformers.PretrainedConfig",
        {"llm_config": {"hybrid_override_pattern": "M-M*"}},
    ),
    "Qwen3NextForCausalLM": (STATE, f"{SGLANG}qwen3_next.Qwen3NextConfig", {}),
    "Qwen3_5ForCausalLM": (STATE, f"{SGLANG}qwen3_5.Qwen3_5TextConfig", {}),
    "Qwen3_5ForConditionalGeneration": (STATE, f"{SGLANG}qwen3_5.Qwen3_5Config", {}),
    "Qwen3_5MoeForCausalLM": (STATE, f"{SGLANG}qwen3_5.Qwen3_5MoeTextConfig", {}),
    "Qwen3_5MoeForConditionalGeneration": (STATE, f"{SGLANG}qwen3_5.Qwen3_5MoeConfig", {}),
    "Qwen4ExpForConditionalGeneration": (STATE, f"{SGLANG}qwen4_exp.Qwen4ExpConfig", {}),
    "ExaoneMoEForCausalLM": (WINDOW, "transformers.ExaoneMoeConfig", {}),
    "ExaoneMoeForCausalLM": (WINDOW, "transformers.ExaoneMoeConfig", {}),
    "IQuestQ1ForCausalLM": (WINDOW, f"{SGLANG}iquest_q1.IQuestQ1Config", {}),
    "InklingForConditionalGeneration": (
        WINDOW,
        "transformers.PretrainedConfig",
        {"text_config": {"local_layer_ids": [0]}},
    ),
    "MiMoV2FlashForCausalLM": (
        WINDOW,
        "transformers.PretrainedConfig",
        {"hybrid_layer_pattern": [0, 1]},
    ),
    "MiMoV2ForCausalLM": (
        WINDOW,
        "transformers.PretrainedConfig",
        {"hybrid_layer_pattern": [0, 1]},
    ),
    "Step3p5ForCausalLM": (WINDOW, f"{SGLANG}step3p5.Step3p5Config", {"layer_types": KINDS}),
    "Step3p7ForConditionalGeneration": (
        WINDOW,
        "transformers.PretrainedConfig",
        {"text_config": {"layer_types": KINDS}},
    ),
    "DeepseekV4ForCausalLM": (INDEXED, "transformers.DeepseekV4Config", {}),
    "Dots3NoteForCausalLM": (INDEXED, f"{SGLANG}dots3.Dots3Config", {"index_topk": 2048}),
    "GlmMoeDsaForCausalLM": (INDEXED, "transformers.GlmMoeDsaConfig", {}),
    "HYV4ForCausalLM": (INDEXED, f"{SGLANG}hy_v4.HYV4Config", {}),
    "GlmOcrForConditionalGeneration": (
        AXES,
        "transformers.PretrainedConfig",
        {"text_config": {"rope_parameters": {"mrope_section": [16, 24, 24]}}},
    ),
}


def draft_architecture(architecture: str) -> str:
    """What SGLang makes of a checkpoint of `architecture` that is given as a draft."""
    from sglang.srt.configs.model_config import ModelConfig

    config = MagicMock(architectures=[architecture])
    config.__deepcopy__ = lambda memo: config
    model = MagicMock(is_draft_model=True, speculative_algorithm="MTP", hf_config=config)
    with suppress(RecursionError):  # of the mock, which is copied: behind the renaming
        ModelConfig._config_draft_model(model)
    return model.hf_config.architectures[0]


def test_every_model_with_an_mtp_class_is_served_or_refused_by_what_it_needs() -> None:
    from sglang.srt.models.registry import ModelRegistry

    served = {family.architecture: family.draft_architecture for family in FAMILIES}
    refused = [*ASKING, *BY_NAME]
    assert len(refused) == len(set(refused)) and not served.keys() & set(refused)
    drafted = {name: draft_architecture(name) for name in ModelRegistry.get_supported_archs()}
    drafted = {name: draft for name, draft in drafted.items() if draft != name}
    assert len(drafted) > 30 and drafted.keys() - served.keys() <= set(refused)
    assert {name: drafted[name] for name in served} == served


@pytest.mark.parametrize("architecture", ASKING)
def test_the_config_of_an_unserved_model_says_what_it_needs(loaded_plugins, architecture) -> None:
    what, path, published = ASKING[architecture]
    module, _, name = path.rpartition(".")
    fields = getattr(importlib.import_module(module), name)(**published).to_dict()
    config = ModelConfig(Path("config.json"), fields, architecture, quantized=False)
    found = missing_capability(config)
    assert found is not None and found.startswith(f"{what} (")


def test_an_index_is_missing_where_this_packages_step_runs(
    loaded_plugins, monkeypatch, tmp_path: Path
) -> None:
    """On CUDA SGLang's own worker serves, which has it."""
    from sglang_ascend.plugin import device, startup_checks
    from sglang_ascend.plugin.errors import StartupRefused

    folder = shutil.copytree(model_path("nano-deepseek"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = SimpleNamespace(
        model_path=str(folder),
        load_format="auto",
        speculative_algorithm="MTP",
        speculative_draft_model_path=None,
        tokenizer_path=None,
        skip_tokenizer_init=False,
        trust_remote_code=False,
    )
    for profile in (device.CPU, device.NPU):
        monkeypatch.setattr(startup_checks, "device_profile", lambda profile=profile: profile)
        with pytest.raises(StartupRefused, match="index_topk"):
            startup_checks.refuse_bad_checkpoint(arguments)
    monkeypatch.setattr(startup_checks, "device_profile", lambda: device.CUDA)
    startup_checks.refuse_bad_checkpoint(arguments)
