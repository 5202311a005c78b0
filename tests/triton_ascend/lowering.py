"""Lowers a kernel as triton-ascend does: TTIR, linalg, then bishengir's passes up to `hivmc`.

`hivmc`, which writes code for the NPU, is a closed part of CANN: no such code is made here.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ascendnpuir
import triton
import triton.backends.ascend.compiler as ascend
import triton.language as tl
from kernel_list import Kernel
from targets import Target
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BISHENGIR = Path(ascendnpuir.__file__).parent / "bin"


class NotLowered(Exception):
    """A kernel that does not reach the code generator: which, for what target, where, and why."""

    def __init__(self, kernel: str, target: str, stage: str, reason: str) -> None:
        super().__init__(f"{kernel} for {target} stops in {stage}: {reason}")
        self.kernel, self.target, self.stage, self.reason = kernel, target, stage, reason


class MemoryOverflow(NotLowered):
    """A kernel whose tiles do not fit ("ub": the unified buffer of a vector core, "cbuf": L1)."""

    def __init__(self, kernel: str, target: str, memory: str, asked: int, available: int) -> None:
        reason = f"{memory} overflow, {asked} bits asked and {available} available."
        super().__init__(kernel, target, "hivm", reason)
        self.memory, self.asked_bits, self.available_bits = memory, asked, available


@dataclass(frozen=True)
class Lowered:
    """The artefacts of a kernel that reached the code generator, each as MLIR text.

    ``retried`` has bishengir's own notes when it needed another attempt with less memory.
    """

    kernel: str
    target: str
    ttir: str
    linalg: str
    hivm: str
    retried: tuple[str, ...]


def constant_of(value: Any) -> Any:
    """TOML has no dtypes: "tl.bfloat16" is Triton's."""
    if isinstance(value, str) and value.startswith("tl."):
        return getattr(tl, value.removeprefix("tl."))
    return value


def jit_function(kernel: Kernel) -> triton.runtime.JITFunction:
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    while not isinstance(function, triton.runtime.JITFunction):
        function = function.fn  # under an autotuner or heuristics
    return function


def backend_of(target: Target) -> tuple[Any, Any, dict[str, Any]]:
    gpu_target = GPUTarget("npu", target.name, 0)
    backend = ascend.AscendBackend(gpu_target)
    options = backend.parse_options(target.options)
    return backend, options, {"target": gpu_target, **vars(options)}


def to_linalg(kernel: Kernel, target: Target) -> tuple[str, str]:
    """(TTIR, linalg) of a kernel, by triton-ascend's own stages."""
    backend, options, metadata = backend_of(target)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    constants = {name: constant_of(value) for name, value in kernel.constants.items()}
    source = ASTSource(jit_function(kernel), kernel.arguments, constants)
    generators = backend.get_codegen_implementation()
    try:
        module = source.make_ir(options, generators, backend.get_module_map(), context)
        module = stages["ttir"](module, metadata)
    except Exception as error:
        raise NotLowered(str(kernel), str(target), "triton's front end", str(error)) from error
    ttir = str(module)
    try:
        return ttir, stages["ttadapter"](module, metadata)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace")
        raise NotLowered(str(kernel), str(target), "triton-adapter-opt", reason) from error


class _KeepsIntermediates(SimpleNamespace):
    """Stands in for `subprocess` where triton-ascend calls bishengir: its command and our flags."""

    def __init__(self, flags: tuple[str, ...]) -> None:
        super().__init__(flags=flags, CalledProcessError=subprocess.CalledProcessError)
        self.process: subprocess.CompletedProcess[str] | None = None

    def run(self, command: list[str], **_: Any) -> None:
        self.process = subprocess.run([*command, *self.flags], capture_output=True, text=True)
        raise subprocess.CalledProcessError(self.process.returncode, command)


@contextmanager
def _only_bishengir(target: Target, folder: Path) -> Iterator[None]:
    """PATH has the target's program under the one name that triton-ascend calls, and no hivmc."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "bishengir-compile").symlink_to(BISHENGIR / target.program)
    # The real NPUUtils is built against CANN, only to ask the driver for the chip's name.
    utilities = SimpleNamespace(get_arch=lambda: target.name)
    with (
        mock.patch.dict(os.environ, {"PATH": str(folder / "bin")}),
        mock.patch.object(ascend, "NPUUtils", lambda: utilities),
    ):
        yield


def run_bishengir(
    linalg: str, target: Target, folder: Path, flags: tuple[str, ...]
) -> tuple[subprocess.CompletedProcess[str], str | None]:
    """triton-ascend's own call, and the last HIVM artefact if there is one."""
    backend, options, metadata = backend_of(target)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    temps = folder / "temps"
    temps.mkdir(parents=True)
    recorder = _KeepsIntermediates((*flags, f"--save-temps={temps}"))
    with (
        _only_bishengir(target, folder),
        mock.patch.object(ascend, "subprocess", recorder),
        suppress(subprocess.CalledProcessError),
    ):
        stages["npubin"](linalg, metadata)
    assert recorder.process is not None
    artefact = temps / "module.hivm.opt.mlir"
    return recorder.process, artefact.read_text() if artefact.exists() else None


def errors_in(stderr: str, target: Target) -> list[str]:
    """Lines that speak of an error, but for those about the absent code generator."""
    expected = (
        target.reached,
        f"[ERROR] Cannot find {target.code_generator} under $PATH",
        f"[ERROR] Failed to run `{target.code_generator} --version`.",
        "[ERROR] Failed to run BiShengIR pipeline",
    )
    lines = [line.strip() for line in stderr.splitlines()]
    return [line for line in lines if "error" in line.lower() and not line.endswith(expected)]


def to_hivm(name: str, linalg: str, target: Target, folder: Path) -> tuple[str, tuple[str, ...]]:
    """(HIVM, notes of retries) of linalg that passes everything before the code generator."""
    process, hivm = run_bishengir(linalg, target, folder / "first", target.flags)
    stderr = process.stderr
    errors = errors_in(stderr, target)
    if hivm is not None and not errors and target.reached in stderr:
        notes = [line for line in stderr.splitlines() if line.startswith("[NOTE]")]
        return hivm, tuple(notes)
    if target.flags:  # in tuning mode it fails without a reason
        process, _ = run_bishengir(linalg, target, folder / "again", ())
        stderr = process.stderr
        errors = errors_in(stderr, target)
    overflow = re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits", stderr)
    if overflow:
        memory, asked, available = overflow.groups()
        raise MemoryOverflow(name, str(target), memory, int(asked), int(available))
    reason = " ".join(errors) or stderr.strip() or "bishengir said nothing."
    raise NotLowered(name, str(target), "bishengir", reason)


def lower(kernel: Kernel, target: Target, folder: Path) -> Lowered:
    """All that can be had of ``kernel`` without CANN; raises NotLowered where it stops earlier.

    ``folder`` must be empty; it keeps the intermediate files.
    """
    ttir, linalg = to_linalg(kernel, target)
    hivm, retried = to_hivm(str(kernel), linalg, target, folder)
    return Lowered(str(kernel), str(target), ttir, linalg, hivm, retried)
