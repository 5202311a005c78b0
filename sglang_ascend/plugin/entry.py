"""The two entry points that SGLang calls; read this to see everything the plugin adds."""

from __future__ import annotations

from sglang_ascend.env import EnvironmentVariableError
from sglang_ascend.plugin.errors import StartupRefused


def activate() -> str | None:
    """Platform entry point: the CPU platform where there is no accelerator, else SGLang's own.

    An out-of-tree platform on a real NPU would switch off half of SGLang's Ascend path.
    """
    from sglang_ascend.plugin.compat import version_problem
    from sglang_ascend.plugin.device import device_profile

    # `import sglang` already asks: it must go on, and register() then refuses with a sentence.
    if version_problem() is not None:
        return None
    return (
        "sglang_ascend.plugin.cpu.platform.EmulationPlatform" if device_profile().emulates else None
    )


def register() -> None:
    """General entry point. Raises StartupRefused: SGLang would log anything else and go on."""
    try:
        _register()
    except EnvironmentVariableError as error:
        raise StartupRefused(str(error)) from None
    except Exception as error:
        raise StartupRefused(
            f"registration failed ({type(error).__name__}: {error}): "
            "run 'sglang-ascend doctor' to see what SGLang lacks."
        ) from error


def _register() -> None:
    from sglang_ascend.plugin.compat import require_supported_versions

    require_supported_versions()

    from sglang_ascend.plugin.attention.registration import register_attention
    from sglang_ascend.plugin.device import device_profile
    from sglang_ascend.plugin.draft_model.algorithm import register_draft_model
    from sglang_ascend.plugin.hooks.registration import hooked_from_the_start, register_hooks
    from sglang_ascend.plugin.mtp.algorithm import register_mtp
    from sglang_ascend.plugin.npu.waits import log_waits
    from sglang_ascend.plugin.quantization.registration import register_quantization
    from sglang_ascend.plugin.startup_checks import register_startup_checks

    register_mtp()
    if device_profile().emulates:
        register_draft_model()
    register_attention()
    register_quantization()
    register_startup_checks()
    if hooked_from_the_start():
        register_hooks()
    log_waits()
