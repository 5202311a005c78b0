"""Applies the hooks of the ledger that a server asks for, and finds those that did not take.

On our CPU platform that is every server. Elsewhere it is one that speculates by MTP, which is known
where SGLang resolves its arguments: hooks are applied there, and the environment tells the
processes that are started afterwards, so that in any other server SGLang stays as it is.
"""

from __future__ import annotations

import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ascend import env
from sglang_ascend.plugin.device import device_profile
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.hooks.ledger import (
    COMMON_HOOKS,
    CPU_HOOKS,
    NPU_HOOKS,
    QUANTIZATION_HOOKS,
    Hook,
)
from sglang_ascend.plugin.hooks.source import digest_of

logger = logging.getLogger(__name__)


def hooks_of_this_device() -> tuple[Hook, ...]:
    """Those that a server with MTP has here, without those that $SGLANG_ASCEND_HOOKS leaves out."""
    profile, hooks = device_profile(), COMMON_HOOKS
    if profile.emulates:
        hooks += CPU_HOOKS + QUANTIZATION_HOOKS
    if profile.keeps_ascend_path:
        hooks += NPU_HOOKS + QUANTIZATION_HOOKS
    only_required = env.HOOKS.get() == "required"
    return tuple(hook for hook in hooks if hook.required or not only_required)


def hooked_from_the_start() -> bool:
    """Whether this process has hooks before it knows what it serves."""
    return device_profile().emulates or env.HOOKS.get() == "all" or env.SERVES_MTP.get()


def tell_processes(serves_mtp: bool) -> None:
    """Those that this one starts from now on."""
    os.environ[env.SERVES_MTP.name] = "1" if serves_mtp else ""


def register_hooks() -> bool:
    """Once each; SGLang applies them after all plugins have registered. True if any is new."""
    new = [hook for hook in hooks_of_this_device() if replacement_of(hook) not in _registered(hook)]
    for hook in new:
        HookRegistry.register(hook.target, replacement_of(hook), HookType(hook.kind))
    return bool(new)


def apply_hooks() -> None:
    """In a process that has loaded its plugins before it knew that it needs hooks."""
    if register_hooks():
        HookRegistry.apply_hooks()


def replacement_of(hook: Hook) -> Callable[..., Any]:
    return pkgutil.resolve_name(hook.replacement)


def _registered(hook: Hook) -> list[Callable[..., Any]]:
    return [
        function
        for kind, function, _ in HookRegistry._hooks.get(hook.target, ())
        if kind.value == hook.kind
    ]


def is_in_place(hook: Hook) -> bool:
    """Applied (SGLang only logs a failed one), and not undone by another plugin: of several
    replacements the last one wins, of wrappers each runs."""
    registered = _registered(hook)
    effective = registered[-1:] if hook.kind == "replace" else registered
    is_applied = hook.target in HookRegistry._patched and replacement_of(hook) in effective
    return is_applied and not _gone_methods(hook)


def _gone_methods(hook: Hook) -> list[str]:
    """Of a class, methods that SGLang's has no longer: nothing calls those that override them."""
    classes = _classes(hook) if hook.methods else ()
    own = [vars(cls) for cls in classes if cls.__module__.startswith("sglang.")]
    return [
        f"{hook.target}.{method}"
        for method in hook.methods
        if not any(method in of_class for of_class in own)
    ]


def missing_hooks() -> list[Hook]:
    return [hook for hook in hooks_of_this_device() if not is_in_place(hook)]


def require_hooks() -> None:
    """Warns of what SGLang now does itself, in one sentence. Raises StartupRefused where MTP or our
    platform could not serve."""
    missing = missing_hooks()
    for hook in missing:
        if hook.required:
            target, *_ = *_gone_methods(hook), hook.target
            raise StartupRefused(
                f"hook {target} could not be applied to SGLang ({len(missing)} missing): run "
                "'sglang-ascend doctor' and reinstall sglang==0.5.23."
            )
    if missing:
        logger.warning(
            "sglang-ascend: hook %s could not be applied to SGLang (%d missing), so %s.",
            missing[0].target,
            len(missing),
            missing[0].why,
        )
    changed = [name for hook in hooks_of_this_device() for name in changed_definitions(hook)]
    if changed:
        logger.warning(
            "sglang-ascend: SGLang's %s is not what its hook was written for (%d differ): "
            "run 'sglang-ascend doctor'.",
            changed[0],
            len(changed),
        )


def changed_definitions(hook: Hook) -> list[str]:
    """Functions whose place is taken and whose source is not the recorded one, or is gone."""
    return [name for name, digest in hook.definitions if _installed_digest(hook, name) != digest]


def _installed_digest(hook: Hook, name: str) -> str | None:
    try:
        return digest_of(original_of(hook, name))
    except (AttributeError, ImportError, OSError, TypeError):
        return None


def original_of(hook: Hook, name: str) -> Any:
    """SGLang's function, behind an applied hook. Raises AttributeError if it is gone."""
    if not hook.methods:
        return inspect.unwrap(pkgutil.resolve_name(name))
    for cls in _classes(hook):
        if cls.__module__.startswith("sglang."):
            return vars(cls)[name.rpartition(".")[2]]
    raise AttributeError(name)


def _classes(hook: Hook) -> Iterator[type]:
    return iter(pkgutil.resolve_name(hook.target).__mro__)
