"""Models whose MTP layer SGLang has a class for and this package does not serve, by what they need.

Source: configs/model_config.py and models/ of SGLang 0.5.23.
"""

from __future__ import annotations

_STATE = "a recurrent state that goes back to the last accepted token"
_WINDOW = "attention over a sliding window"
_SPARSE = "attention over tokens that an index chooses"
_TENSORS = "the names and shapes of its tensors, which this package has not learned"

NEEDED = {
    _STATE: (
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "Glm5NextForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Omni_Reasoning_V3",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
    ),
    _WINDOW: (
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "IQuestQ1ForCausalLM",
        "InklingForConditionalGeneration",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    ),
    _SPARSE: (
        "DeepseekV4ForCausalLM",
        "Dots3NoteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV4ForCausalLM",
    ),
    "two attentions in a layer": ("LongcatFlashForCausalLM",),
    _TENSORS: (
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "GigaChat35ForCausalLM",
        "GlmOcrForConditionalGeneration",
        "HYV3ForCausalLM",
        "Qwen3MoeForCausalLM",
    ),
}


def needs(architecture: str) -> str | None:
    """What serving the model's MTP layer takes and is missing; None of a model without one."""
    for what, architectures in NEEDED.items():
        if architecture in architectures:
            return what
    return None
