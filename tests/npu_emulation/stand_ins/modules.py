"""Modules of CANN and `sgl_kernel_npu`, which SGLang imports whether or not it calls them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

from npu_emulation.stand_ins.kernels import KERNELS

STAND_INS = (
    ("`torchair`", "`srt/utils/common.py`, at import", "a compiler that runs the graph as it is"),
    ("`acl`", "`srt/hardware_backend/npu/utils.py`", "`get_device_info`: not an Ascend 950"),
    ("`custom_ops`", "`srt/hardware_backend/npu/utils.py`", "an empty module"),
    ("`sgl_kernel_npu`", "80 imports", "kernels that raise by their names, but for those below"),
    (
        "`sgl_kernel_npu.norm.fused_rope_qk_mqa`",
        "`srt/layers/rotary_embedding/base.py`",
        "cannot be imported, for which SGLang has a way of its own",
    ),
)

PACKAGE = "sgl_kernel_npu"
NOT_THERE = f"{PACKAGE}.norm.fused_rope_qk_mqa"
ARCHITECTURE_OF_A2_AND_A3 = (2201, 0)  # an Ascend 950 says 3510


class CompilerConfig:
    """Takes every setting."""

    def __init__(self) -> None:
        self.debug = types.SimpleNamespace()


def _graph_as_it_is(compiler_config: Any = None) -> Callable[..., Any]:
    return lambda graph_module, example_inputs: graph_module.forward


def _get_device_info(device: int, attribute: int) -> tuple[int, int]:
    return ARCHITECTURE_OF_A2_AND_A3


# Module and what is in it; packages are made for the names with dots.
MODULES: dict[str, dict[str, Any]] = {
    "torchair": {"get_npu_backend": _graph_as_it_is, "CompilerConfig": CompilerConfig},
    "torchair.configs.compiler_config": {"CompilerConfig": CompilerConfig},
    "torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce": {},
    "acl.rt": {"get_device_info": _get_device_info},
    "custom_ops": {},
}


class AbsentKernel:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> AbsentKernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{PACKAGE}.{self.name} has no stand-in: define it in npu_emulation/stand_ins."
        )


class KernelModule(types.ModuleType):
    """Has every name: the kernels that are defined here, and others that raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kernel = f"{self.__name__}.{name}".removeprefix(f"{PACKAGE}.")
        return KERNELS.get(kernel) or AbsentKernel(kernel)


class KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module below `sgl_kernel_npu` exists."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != PACKAGE or name == NOT_THERE:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return KernelModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _module(name: str) -> types.ModuleType:
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_module(parent), child, module)
    return sys.modules[name]


def install(others: dict[str, dict[str, Any]]) -> None:
    for name, contents in (MODULES | others).items():
        vars(_module(name)).update(contents)
    if not any(isinstance(finder, KernelFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, KernelFinder())
