"""Where the emulated NPU may run, and the environment of a process that has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Names of a process's emulated device; acl/device.c reads the last three.
LIBRARIES = "NPU_EMULATION"
DEVICES, SOC, CANN = "NPU_EMULATION_DEVICES", "NPU_EMULATION_SOC", "NPU_EMULATION_CANN"

# One of each generation that torch_npu 2.13 tells apart (NpuVariables.h): A2, A3, 950.
SOCS = ("Ascend910B3", "Ascend910_9392", "Ascend950PR_9599")
DEFAULT_CANN = "8.5.0"

CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_FOLDER = Path("/usr/local/Ascend")
START = Path(__file__).parent / "start"  # its sitecustomize.py runs first in every process


class CannPresentError(RuntimeError):
    """The machine has the real runtime, which the emulated one would hide."""


def require_no_cann(
    environ: Mapping[str, str], build: Path | None = None, cann_folder: Path = CANN_FOLDER
) -> None:
    """Raise CannPresentError where CANN is set up, installed or on the library path.

    `build` is where the emulated libraries are, or will be.
    """
    found = [f"{name} is set" for name in CANN_VARIABLES if environ.get(name)]
    if cann_folder.exists():
        found.append(f"{cann_folder} exists")
    for folder in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        library = Path(folder) / "libascendcl.so"
        if library.exists() and (build is None or Path(folder).resolve() != build.resolve()):
            found.append(f"{library} is on LD_LIBRARY_PATH")
    if found:
        raise CannPresentError(
            f"the emulated NPU does not run where CANN is present ({', '.join(found)}): "
            "use a machine or container without it."
        )


def emulated_environment(
    environ: Mapping[str, str],
    build: Path,
    soc: str = SOCS[0],
    cann: str = DEFAULT_CANN,
    num_devices: int = 1,
) -> dict[str, str]:
    """`environ` with the libraries in `build` in CANN's place and such a device."""
    require_no_cann(environ, build)
    return {
        **environ,
        "LD_LIBRARY_PATH": _with_first(build, environ.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _with_first(START, environ.get("PYTHONPATH", "")),
        LIBRARIES: str(build),
        DEVICES: str(num_devices),
        SOC: soc,
        CANN: cann,
        # The thread that dispatches an operator makes its ACL calls, in the program's order.
        "TASK_QUEUE_ENABLE": "0",
        # Else a thread of torch_npu asks for each collective's event until it lets the work run.
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        # Triton reads it as its own modules are imported, which torch may do.
        "TRITON_INTERPRET": "1",
    }


def _with_first(folder: Path, paths: str) -> str:
    others = [path for path in paths.split(":") if path and path != str(folder)]
    return ":".join((str(folder), *others))


def build_folder() -> Path:
    """The folder of libraries that this process runs on."""
    folder = os.environ.get(LIBRARIES)
    if not folder:
        raise RuntimeError(f"{LIBRARIES} is not set: start this with scripts/npu_emulation.sh.")
    return Path(folder)
