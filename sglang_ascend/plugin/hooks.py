"""Applies the hooks of the ledger that this device needs, and finds those that did not take."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend.plugin.device import runs_fused_step, serves_on_cpu, serves_on_npu
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.hook_ledger import (
    COMMON_HOOKS,
    CPU_HOOKS,
    NPU_HOOKS,
    STEP_HOOKS,
    Hook,
)


def active_hooks() -> tuple[Hook, ...]:
    hooks = COMMON_HOOKS
    if runs_fused_step():
        hooks += STEP_HOOKS
    if serves_on_cpu():
        hooks += CPU_HOOKS
    if serves_on_npu():
        hooks += NPU_HOOKS
    return hooks


def register_hooks() -> None:
    for hook in active_hooks():
        HookRegistry.register(hook.target, hook.replacement, hook.kind)


def is_in_place(hook: Hook) -> bool:
    """Applied (SGLang only logs a failed one), and not undone by another plugin: of several
    replacements the last one wins, of wrappers each runs."""
    of_this_kind = [
        function
        for kind, function, _ in HookRegistry._hooks.get(hook.target, ())
        if kind is hook.kind
    ]
    effective = of_this_kind[-1:] if hook.kind is HookType.REPLACE else of_this_kind
    return hook.target in HookRegistry._patched and hook.replacement in effective


def missing_hooks() -> list[Hook]:
    return [hook for hook in active_hooks() if not is_in_place(hook)]


def require_hooks() -> None:
    """Raises StartupRefused; called where SGLang first asks us something after applying hooks."""
    missing = missing_hooks()
    if missing:
        raise StartupRefused(
            f"hook {missing[0].target} could not be applied to SGLang "
            f"({len(missing)} missing): run 'sglang-ascend doctor' and reinstall sglang==0.5.23."
        )
