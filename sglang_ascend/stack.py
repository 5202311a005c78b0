"""What serves on an Ascend NPU beside this package: stacks that people run, and what is installed.

CANN, torch_npu, triton-ascend and sgl-kernel-npu are built for one another. A mixture starts and
fails later, so ``sglang-ascend doctor`` compares. Nothing here imports any of them.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

# One part of a stack is no distribution.
CANN = "CANN"
KERNELS = "sgl-kernel-npu"
DEVICE_MANAGER = Path("/dev/davinci_manager")


@dataclass(frozen=True)
class Stack:
    """Versions that ``publisher`` serves with. A version stands for all that begin with it."""

    publisher: str
    source: str
    versions: Mapping[str, str]


GUIDE = "https://docs.sglang.io/docs/hardware-platforms/ascend-npus/getting-started/installation"
STACKS = (
    Stack(
        "SGLang's guide for Ascend",
        GUIDE,
        {
            "python": "3.11",
            CANN: "9.0.0",
            "torch": "2.10",
            "torch_npu": "2.10.0",
            "triton-ascend": "3.2.1",
            KERNELS: "2026.5.1",
        },
    ),
    Stack(
        "SGLang's next images",
        "https://github.com/sgl-project/sglang/pull/40524",
        {
            "python": "3.12",
            CANN: "9.1.0",
            "torch": "2.10",
            "torch_npu": "2.10.0",
            "triton-ascend": "3.2.2",
            KERNELS: "2026.9.0",
        },
    ),
    Stack(
        "tests of this package, on an emulated NPU",
        "requirements/npu.txt",
        {
            "python": "3.11",
            CANN: "8.5.0",
            "torch": "2.13",
            "torch_npu": "2.13.0",
            "triton-ascend": "3.2.0",
            KERNELS: "none",
        },
    ),
)
PARTS = tuple(STACKS[0].versions)

# The CANN that each compiler is made for: triton-ascend's installation guide, and vllm-ascend 0.23.
CANN_OF_TRITON = {"3.2.0": "8.5", "3.2.1": "9.0", "3.2.2": "9.1"}
# From this one on triton-ascend installs upstream triton itself and then overwrites its files.
REPLACES_TRITON = (3, 2, 1)


@dataclass(frozen=True)
class Installed:
    """What is here. A version is None where the part is absent or does not tell."""

    versions: Mapping[str, str | None]
    has_kernels: bool  # whether sgl_kernel_npu can be found, which SGLang imports
    upstream_triton: str | None  # version of the distribution ``triton``
    triton_knows_ascend: bool  # whether the files of ``triton`` are triton-ascend's

    @classmethod
    def here(cls) -> Installed:
        versions = {part: installed_version(part) for part in PARTS}
        versions |= {"python": platform.python_version(), CANN: cann_version()}
        triton = find_spec("triton")
        folders = (
            [Path(folder) for folder in triton.submodule_search_locations or ()] if triton else []
        )
        return cls(
            versions,
            find_spec("sgl_kernel_npu") is not None,
            installed_version("triton"),
            any((folder / "backends" / "ascend").is_dir() for folder in folders),
        )


def is_wanted() -> bool:
    """Whether this machine is meant for an NPU: it has torch_npu, CANN's environment or a card."""
    return bool(installed_version("torch_npu") or toolkit() or DEVICE_MANAGER.exists())


def nearest(installed: Installed) -> Stack:
    """The stack that most of what is installed belongs to; the first of several."""
    return max(STACKS, key=lambda stack: sum(agrees(stack, installed, part) for part in PARTS))


def agrees(stack: Stack, installed: Installed, part: str) -> bool:
    found = installed.versions.get(part)
    return found is not None and _begins(found, stack.versions[part])


def problems(installed: Installed) -> list[str]:
    """One sentence for each part that is missing, or made for another version of a second part."""
    found = [_torch(installed), _kernels(installed), _compiler(installed), _files(installed)]
    return [problem for problem in found if problem is not None]


def _torch(installed: Installed) -> str | None:
    torch, torch_npu = installed.versions["torch"], installed.versions["torch_npu"]
    if torch_npu is None:
        return (
            "torch_npu is not installed, so torch has no NPU: install the one of your stack, or "
            "use docker/Dockerfile, whose base has it."
        )
    if torch is None or _release(torch)[:2] == _release(torch_npu)[:2]:
        return None
    return (
        f"torch_npu {torch_npu} is built for torch {_minor(torch_npu)}, found torch {torch}: "
        f"install torch=={'.'.join(map(str, _release(torch_npu)))}."
    )


def _kernels(installed: Installed) -> str | None:
    if installed.has_kernels:
        return None
    return (
        "sgl_kernel_npu is not installed, and SGLang's NPU code imports it: install the release of "
        "github.com/sgl-project/sgl-kernel-npu for your torch, CANN and chip, or use "
        "docker/Dockerfile, whose base has it."
    )


def _compiler(installed: Installed) -> str | None:
    compiler, cann = installed.versions["triton-ascend"], installed.versions[CANN]
    if compiler is None:
        return (
            "triton-ascend is not installed, so no Triton kernel runs: install the one that your "
            "CANN asks for."
        )
    wanted = CANN_OF_TRITON.get(".".join(map(str, _release(compiler))))
    if wanted is None or cann is None or _begins(cann, wanted):
        return None
    made_for = [name for name, of in CANN_OF_TRITON.items() if _begins(cann, of)]
    remedy = f"triton-ascend {made_for[0]}" if made_for else f"CANN {wanted}"
    return (
        f"triton-ascend {compiler} is made for CANN {wanted}, found CANN {cann}: install {remedy}."
    )


def _files(installed: Installed) -> str | None:
    compiler, upstream = installed.versions["triton-ascend"], installed.upstream_triton
    if compiler is None or upstream is None:
        return None
    again = f"pip install --force-reinstall --no-deps triton-ascend=={compiler}"
    if not installed.triton_knows_ascend:
        return f"the files of triton are upstream's {upstream}, not triton-ascend's: {again}."
    if _release(compiler) < REPLACES_TRITON:
        return (
            f"upstream triton {upstream} is beside triton-ascend {compiler} in one folder: "
            f"pip uninstall triton, then {again}."
        )
    return None


def _begins(found: str, wanted: str) -> bool:
    """Whether the release numbers of ``found`` begin with those of ``wanted``: 2.10.0 with 2.10."""
    numbers = _release(wanted)
    return bool(numbers) and _release(found)[: len(numbers)] == numbers


def _release(text: str) -> tuple[int, ...]:
    """(2, 10, 0) of 2.10.0.post7, 2.10.0+cpu and 2.10.0.dev1; leading zeros do not count."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _minor(text: str) -> str:
    return ".".join(map(str, _release(text)[:2]))


def installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def toolkit() -> Path | None:
    """CANN's folder, as its ``set_env.sh`` exports it."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    return Path(home) if home else None


def cann_version() -> str | None:
    """As the toolkit's own file has it; its folder differs between versions and processors."""
    home = toolkit()
    for file in sorted(home.glob("**/ascend_toolkit_install.info")) if home else ():
        found = re.search(r"^version=(.+)$", file.read_text(), flags=re.MULTILINE)
        if found:
            return found.group(1).strip()
    return None
