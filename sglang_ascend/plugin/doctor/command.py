"""The checks of `sglang-ascend doctor`: what is installed, what SGLang chose, what is in place.

Nothing here needs SGLang or torch to be importable: what is missing is reported, not raised.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec

from sglang_ascend import env, stack
from sglang_ascend.plugin.compat import SUPPORTED_SGLANG, version_problem
from sglang_ascend.plugin.doctor.ascend import check_constraints, check_stack
from sglang_ascend.plugin.doctor.report import Report, Section
from sglang_ascend.plugin.errors import StartupRefused

DISTRIBUTION = "sglang-ascend"
ENTRY_POINT = "sglang_ascend"
GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")
PACKAGES = ("torch", "sglang", "transformers", "torch_npu", "triton", DISTRIBUTION)
SGLANG_SWITCHES = ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE")


def examine(*, strict: bool = False) -> Report:
    """Everything, in the order in which a server would meet it. Loads SGLang and its plugins.

    ``strict`` also compares torch_npu with what this package knows of it.
    """
    sections = [check_versions(), check_environment(os.environ), check_entry_points()]
    if stack.is_wanted():
        sections.insert(1, check_stack(stack.Installed.here()))
    if version_problem() is None:
        sections += check_sglang()
    if find_spec("torch") is not None:
        sections += [check_operators(), check_integer_products()]
        if strict:
            sections.append(check_constraints())
    return Report((*sections, check_models()))


def check_versions() -> Section:
    rows = [("python", platform.python_version())]
    rows += [(name, stack.installed_version(name) or "not installed") for name in PACKAGES]
    problem = version_problem()
    return Section("Versions", ("package", "version"), tuple(rows), (problem,) if problem else ())


def check_environment(environ: os._Environ[str] | dict[str, str]) -> Section:
    """Variables of SGLang that would leave us out, and our own: unknown or unreadable ones."""
    relevant = {
        name: value
        for name, value in sorted(environ.items())
        if name in SGLANG_SWITCHES or name.startswith(env.PREFIX)
    }
    problems = list(env.unknown_variables(environ))
    for variable in env.VARIABLES:
        try:
            variable.get(environ)
        except env.EnvironmentVariableError as error:
            problems.append(str(error))
    problems += _switch_problems(environ)
    return Section("Environment", ("variable", "value"), tuple(relevant.items()), tuple(problems))


def _switch_problems(environ: os._Environ[str] | dict[str, str]) -> Iterator[str]:
    selected = environ.get("SGLANG_PLATFORM")
    if selected and selected != ENTRY_POINT:
        yield (
            f"SGLANG_PLATFORM={selected} makes SGLang skip this package, hooks included: unset it."
        )
    if selected == ENTRY_POINT and _activate() is None:
        yield (
            f"SGLANG_PLATFORM={selected} insists on the CPU platform, which is not used on this "
            "machine, so SGLang will not start: unset it."
        )
    allowed = environ.get("SGLANG_PLUGINS")
    if allowed and ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        yield f"SGLANG_PLUGINS={allowed} leaves {ENTRY_POINT} out: add it or unset the variable."
    if environ.get("SGLANG_USE_CPU_ENGINE", "").lower() in ("1", "true", "yes", "y"):
        yield (
            "SGLANG_USE_CPU_ENGINE asks for SGLang's own CPU kernels, which this package does not "
            "use: unset it."
        )


def _activate() -> str | None:
    if find_spec("torch") is None:
        return None
    from sglang_ascend.plugin.entry import activate

    return activate()


def check_entry_points() -> Section:
    """Every plugin that SGLang will find; ours must be there once in each group."""
    rows, problems = [], []
    for group in GROUPS:
        found = [
            (point, point.dist.name if point.dist else "?") for point in entry_points(group=group)
        ]
        rows += [(group, point.name, point.value, name) for point, name in found]
        ours = [point for point, name in found if name == DISTRIBUTION]
        if len(ours) != 1:
            problems.append(
                f"{DISTRIBUTION} is registered {len(ours)} times in {group} instead of once: "
                f"reinstall it with 'pip install --force-reinstall --no-deps {DISTRIBUTION}'."
            )
    columns = ("group", "name", "target", "distribution")
    return Section("Entry points", columns, tuple(rows), tuple(problems))


def check_sglang() -> list[Section]:
    """Loads the plugins as every SGLang process does, then looks at what is in place."""
    try:
        with _quiet():
            # First of all: importing one of SGLang's modules before the package is circular.
            importlib.import_module("sglang")
            importlib.import_module("sglang.srt.plugins").load_plugins()
        checks: tuple[Callable[[], Section], ...] = (
            check_platform,
            check_hooks,
            check_registered,
        )
        return [check() for check in checks]
    except StartupRefused as error:
        problem = str(error)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = (
            f"SGLang {SUPPORTED_SGLANG} could not be loaded ({reason}): reinstall what "
            "requirements/ pins."
        )
    return [Section("SGLang", ("check", "result"), (("load_plugins", "failed"),), (problem,))]


def check_platform() -> Section:
    from sglang.srt.platforms import current_platform

    from sglang_ascend.plugin.device import device_profile

    chosen = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    expected = _activate()
    problems = ()
    if expected is not None and chosen != expected:
        problems = (f"SGLang chose platform {chosen} instead of {expected}: see Environment.",)
    rows = (
        ("platform", chosen),
        ("why", device_profile().reason),
        ("device", current_platform.device_type),
    )
    return Section("Platform", ("what", "value"), rows, problems)


def check_hooks() -> Section:
    """Those of a server with MTP on this device, applied as such a server does."""
    from sglang_ascend.plugin.hooks import registration

    registration.apply_hooks()
    rows, problems = [], []
    for hook in registration.hooks_of_this_device():
        in_place, changed = registration.is_in_place(hook), registration.changed_definitions(hook)
        state = "in place" if in_place else "MISSING"
        need = "required" if hook.required else "mends"
        rows.append((hook.target, need, state, hook.why, hook.delete_when, hook.patch or "-"))
        if not in_place:
            effect = "so the server will not start" if hook.required else f"so {hook.why}"
            problems.append(
                f"hook {hook.target} is not in place, {effect}: reinstall "
                f"sglang=={SUPPORTED_SGLANG} and remove other plugins that replace it."
            )
        problems += [
            f"SGLang's {name} is not the function that its hook was written for: reinstall "
            f"sglang=={SUPPORTED_SGLANG}."
            for name in changed
            if in_place
        ]
    columns = ("hook", "need", "state", "why", "delete when", "patch")
    return Section("Hooks", columns, tuple(rows), tuple(problems))


def check_registered() -> Section:
    """The two names that SGLang must know: the algorithm and, on the CPU, our backend."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_ascend.plugin.cpu.platform import ATTENTION_BACKEND
    from sglang_ascend.plugin.device import device_profile
    from sglang_ascend.plugin.mtp.algorithm import MTPAlgorithm
    from sglang_ascend.speculative.config import NAME

    algorithm, backend = get_spec(NAME), ATTENTION_BACKENDS.get(ATTENTION_BACKEND)
    rows = (
        (f"--speculative-algorithm {NAME}", _qualified_name(type(algorithm))),
        (f"--attention-backend {ATTENTION_BACKEND}", _qualified_name(backend)),
    )
    problems = []
    if not isinstance(algorithm, MTPAlgorithm):
        problems.append(f"--speculative-algorithm {NAME} is not ours or unknown: see Environment.")
    if device_profile().emulates and not _qualified_name(backend).startswith(f"{ENTRY_POINT}."):
        problems.append(f"--attention-backend {ATTENTION_BACKEND} is not ours: see Environment.")
    return Section("Registered", ("flag", "served by"), rows, tuple(problems))


def _qualified_name(thing: object) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"


def check_operators() -> Section:
    """The implementation that each operator uses on this machine's device."""
    from sglang_ascend.ops.dispatch import OPS, load_operators
    from sglang_ascend.plugin.device import device_profile

    load_operators()
    device, rows, problems = device_profile().device_type, [], []
    for name, op in sorted(OPS.items()):
        try:
            rows.append((name, device, op.choose(device).name))
        except RuntimeError as error:
            rows.append((name, device, "none"))
            problems.append(f"{error} Report it: one of them must be narrowed.")
    return Section(
        "Operators", ("operator", "device", "implementation"), tuple(rows), tuple(problems)
    )


def check_integer_products() -> Section:
    """What the probe found: an int8 product that is not int64's is never chosen."""
    from sglang_ascend.ops.quantized import probe

    rows = tuple(
        (name, verdict, "yes" if probe.is_chosen(name) else "no")
        for name, verdict in probe.verdicts().items()
    )
    return Section("Integer products on CPU", ("body", "compared with int64", "chosen"), rows)


def check_models() -> Section:
    from sglang_ascend.env import CACHE, EnvironmentVariableError
    from sglang_ascend.models.catalog import MODELS

    rows = []
    try:
        cache = CACHE.get()
    except EnvironmentVariableError as error:
        return Section("Models", ("model", "state", "folder"), (), (str(error),))
    for name in MODELS:
        folder = cache / name
        built = (folder / "config.json").is_file()
        state = "built" if built else f"not built ('sglang-ascend model-path {name}' builds it)"
        rows.append((name, state, str(folder)))
    return Section("Models", ("model", "state", "folder"), tuple(rows))


@contextmanager
def _quiet() -> Iterator[None]:
    """SGLang warns of much that does not matter here; its errors stay."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
