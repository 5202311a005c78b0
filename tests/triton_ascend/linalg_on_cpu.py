"""Executes triton-ascend's linalg on the CPU: mlir-19 lowers it to LLVM IR, llvmlite runs that.

Programs run one after another on the tensors' own memory: it shows front end and adapter, no more.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import llvmlite.binding as llvm
import torch

MLIR = Path(sys.prefix) / "mlir" / "usr" / "lib" / "llvm-19"
LIBRARIES = (MLIR / "lib", MLIR.parent / "x86_64-linux-gnu")
# Strided copies and bf16; each needs those before it, which only LD_LIBRARY_PATH would find.
RUNTIME = (
    LIBRARIES[1] / "libLLVM.so.19.1",
    MLIR / "lib" / "libmlir_float16_utils.so.19.1",
    MLIR / "lib" / "libmlir_c_runner_utils.so.19.1",
)

PASSES = (
    "--canonicalize",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=bufferize-function-boundaries=false allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-complex-to-llvm",
    "--convert-vector-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-index-to-llvm",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)

ELEMENTS = {
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
# Before a kernel's own arguments: memory for locks between cores, and a workspace. After them: the
# grid's size and the program's place in it.
NUM_LEADING, NUM_TRAILING = 2, 6


def _run(tool: str, *arguments: str, text: str) -> str:
    environ = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, LIBRARIES))}
    command = [str(MLIR / "bin" / tool), "--allow-unregistered-dialect", *arguments]
    process = subprocess.run(command, input=text, env=environ, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{tool} does not take the linalg: {process.stderr[:2000]}")
    return process.stdout


def to_llvm_ir(linalg: str) -> str:
    """Ascend's hints, attributes of dialects that this MLIR lacks, are left out."""
    upstream = re.sub(r" \{hivm\.[^}]*\}", "", linalg)
    return _run("mlir-translate", "--mlir-to-llvmir", text=_run("mlir-opt", *PASSES, text=upstream))


def argument_types(linalg: str) -> list[str]:
    """ "memref<?xf32>" or "i32" for each argument of the kernel, as Triton lists them."""
    header = re.search(r"func\.func @\w+\((.*?)\) attributes", linalg)
    if header is None:
        raise ValueError("the linalg holds no kernel.")
    types = re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", header[1])
    return types[NUM_LEADING : len(types) - NUM_TRAILING]


class Executable:
    """A kernel's linalg, compiled for this CPU."""

    def __init__(self, linalg: str) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        for library in RUNTIME:
            llvm.load_library_permanently(str(library))
        self.types = argument_types(linalg)
        name = re.search(r"func\.func @(\w+)", linalg)
        assert name
        module = llvm.parse_assembly(to_llvm_ir(linalg))
        module.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
        self._engine = llvm.create_mcjit_compiler(module, machine)  # owns the code
        self._engine.finalize_object()
        self._address = self._engine.get_function_address(name[1])

    def run(self, grid: tuple[int, ...], *arguments: torch.Tensor | float) -> None:
        """Every program of the grid, x fastest. A tensor stands for all of its memory."""
        scratch = torch.zeros(1 << 16, dtype=torch.int8)
        values = [*_descriptor(scratch), *_descriptor(scratch)]
        for wanted, argument in zip(self.types, arguments, strict=True):
            values += _as_c(wanted, argument)
        num_x, num_y, num_z = (*grid, 1, 1, 1)[:3]
        values += [ctypes.c_int32(size) for size in (num_x, num_y, num_z)]
        places = [ctypes.c_int32() for _ in range(3)]
        prototype = ctypes.CFUNCTYPE(None, *map(type, values), *map(type, places))
        function = prototype(self._address)
        for z, y, x in product(range(num_z), range(num_y), range(num_x)):
            function(*values, x, y, z)


def _descriptor(tensor: torch.Tensor) -> list[ctypes._SimpleCData]:
    """A one-dimensional memref: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(tensor.data_ptr())
    sizes = (0, tensor.untyped_storage().size() // tensor.element_size(), 1)
    return [pointer, pointer, *map(ctypes.c_int64, sizes)]


def _as_c(wanted: str, argument: torch.Tensor | float) -> list[ctypes._SimpleCData]:
    if not isinstance(argument, torch.Tensor):
        return [SCALARS[wanted](argument)]
    element = re.fullmatch(r"memref<\?x(\w+)>", wanted)
    if element is None or ELEMENTS[element[1]] != argument.dtype:
        raise TypeError(f"the kernel takes {wanted}, not a tensor of {argument.dtype}.")
    return _descriptor(argument)
