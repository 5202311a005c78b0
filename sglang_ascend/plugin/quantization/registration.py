"""Names of quantization methods that SGLang does not know on this platform."""

from __future__ import annotations

from sglang_ascend.plugin.device import device_profile


def register_quantization() -> None:
    """SGLang refuses the name of a method that it has no kernels for; ``served_config`` needs
    none."""
    if not device_profile().emulates:
        return
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    from sglang_ascend.plugin.quantization.loading import ServedQuantization

    QUANTIZATION_METHODS.setdefault("gptq", ServedQuantization)
