"""Compiles the attention kernels for an H100 as they are launched there; prints what they take.

A process of its own: where a test has asked for Triton's interpreter nothing is compiled. The
control has tiles for 1 MiB of shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from sglang_ascend.ops.attention import tiles, triton_kernels, triton_latent_kernels
from sglang_ascend.ops.attention import triton as bodies

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}


class Launches:
    """Stands where a kernel does; keeps the arguments of its last launch."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: Any, **constants: Any) -> None:
            self.args, self.constants = args, constants

        return launch


def compiled(launches: Launches) -> dict[str, int]:
    """Registers and spilled bytes of a thread, shared bytes and warp-group products."""
    kernel, names = launches.kernel, launches.kernel.arg_names
    options = {name: launches.constants[name] for name in OPTIONS if name in launches.constants}
    constants = {
        (names.index(name),): value
        for name, value in launches.constants.items()
        if name not in OPTIONS
    }
    signature = {names[place]: "constexpr" for (place,) in constants}
    attributes = {}
    for place, value in enumerate(launches.args):
        is_tensor, parameter = isinstance(value, torch.Tensor), kernel.params[place]
        signature[names[place]] = TYPES[value.dtype if is_tensor else type(value)]
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            continue
        if is_tensor or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, {name: signature[name] for name in names}, constants, attributes)
    program = triton.compile(source, target=TARGET, options=options)
    said = subprocess.run(
        [get_ptxas(90).path, "-v", "-arch=sm_90a", "-o", "/dev/null", "-"],
        input=program.asm["ptx"],
        capture_output=True,
        text=True,
    ).stderr
    patterns = {"registers": r"Used (\d+)", "spilled": r"(\d+) bytes spill stores"}
    used = {name: int(re.search(pattern, said)[1]) for name, pattern in patterns.items()}
    used["wgmma"] = program.asm["ptx"].count("wgmma.mma_async")
    return used | {"shared": program.metadata.shared}


def mla_programs(num_heads: int, query_len: int, dtype: torch.dtype) -> None:
    bodies.paged_mla(
        torch.zeros(query_len, num_heads, 576, dtype=dtype),
        torch.zeros(64, 1, 576, dtype=dtype),
        torch.zeros(1, 128, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        query_len=query_len,
        page_size=64,
        scale=576**-0.5,
        kv_lora_rank=512,
    )


def gqa_programs(head_dim: int, dtype: torch.dtype) -> None:
    cache = torch.zeros(64, 8, head_dim, dtype=dtype)
    bodies.paged_gqa(
        torch.zeros(4, 32, head_dim, dtype=dtype),
        cache,
        cache,
        torch.zeros(1, 128, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        query_len=4,
        page_size=1,
        scale=head_dim**-0.5,
    )


def main() -> None:
    modules = {
        "mla_split": triton_kernels,
        "gqa_split": triton_kernels,
        "merge_splits": triton_latent_kernels,
    }
    kernels = {name: Launches(getattr(module, name)) for name, module in modules.items()}
    for name, launches in kernels.items():
        setattr(modules[name], name, launches)
    programs = {}
    for num_heads, query_len, dtype in (
        (16, 1, torch.bfloat16),
        (16, 4, torch.bfloat16),
        (128, 4, torch.bfloat16),
        (16, 4, torch.float32),
    ):
        mla_programs(num_heads, query_len, dtype)
        name = f"mla {num_heads} heads, {query_len} rows, {dtype}"
        programs[name] = compiled(kernels["mla_split"])
    gqa_programs(128, torch.bfloat16)
    programs["gqa 32/8 heads, 4 rows, torch.bfloat16"] = compiled(kernels["gqa_split"])
    programs["merge"] = compiled(kernels["merge_splits"])
    tiles.MACHINES["cpu"] = replace(tiles.H100, factor_bytes=1 << 20)
    mla_programs(16, 4, torch.bfloat16)
    programs["control"] = compiled(kernels["mla_split"])
    print(json.dumps(programs, indent=1))


if __name__ == "__main__":
    main()
