"""The versions this plugin serves; anything else stops the server with one sentence."""

from __future__ import annotations

from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.stack import installed_version

SUPPORTED_SGLANG = "0.5.23"
# SGLang's guide for Ascend has torch 2.10, torch_npu 2.13.0 pins torch 2.13, and the CUDA build of
# SGLang 0.5.23 pins torch 2.14.
SUPPORTED_TORCH = ("2.10", "2.13", "2.14")


def version_problem() -> str | None:
    """The sentence that says which version is wrong, or None."""
    found = installed_version("sglang")
    if found != SUPPORTED_SGLANG:
        return (
            f"this release adapts SGLang {SUPPORTED_SGLANG}, found {found or 'none'}: "
            f"install sglang=={SUPPORTED_SGLANG} or uninstall sglang-ascend."
        )
    found = installed_version("torch") or "none"
    if ".".join(found.split(".")[:2]) not in SUPPORTED_TORCH:
        return (
            f"torch {found} is not one of {', '.join(SUPPORTED_TORCH)}: "
            "install the version that requirements/ pins for your device."
        )
    return None


def require_supported_versions() -> None:
    """Raises StartupRefused."""
    if (problem := version_problem()) is not None:
        raise StartupRefused(problem)
