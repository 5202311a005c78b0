"""Stubs of what a CUDA build of torch is linked with, once its own CUDA libraries were removed.

PyPI has no other build of torch 2.10 for x86-64, and torch_npu 2.10 is made for the CPU build:
beside libc10_cuda.so it ends the process, for both register the same settings of an allocator.
A CPU build needs no stub and gets none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

LOADED_FIRST = ("libtorch_global_deps.so", "libtorch_python.so")  # by `import torch`
OF_TORCH = "libtorch_cuda.so"
NO_DEVICE = 100  # cudaErrorNoDevice; 0 of torch's own functions is a count of devices
REFERENCE = "_ZN4c10d15get_gil_checkerEv"  # what it refers to is written as torch is loaded

Run = Callable[..., str]


def build_cuda_stubs(
    folder: Path, torch_libraries: Path, provided: set[str], compiler: str, run: Run
) -> None:
    """Makes them in ``folder``. ``provided``: what torch, Python and the system define.

    ``run`` gives the output of a command and raises where it fails.
    """
    loaded, missing = _loaded(torch_libraries, run)
    if OF_TORCH not in missing:
        return
    wanted: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for path in loaded:
        files = _files_of_versions(path, run)
        for line in run("nm", "-D", "--undefined-only", path).splitlines():
            kind, (name, _, version) = line.split()[-2], line.split()[-1].partition("@")
            if files.get(version) in missing:
                wanted[files[version]][version].add(name)
            elif kind == "U" and not (version or name in provided or re.match("_?Py", name)):
                wanted[OF_TORCH][""].add(name)
    for library, versions in wanted.items():
        _build(folder, library, versions, compiler, run)


def _build(
    folder: Path, library: str, versions: dict[str, set[str]], compiler: str, run: Run
) -> None:
    source, script = folder / f"{library}.c", folder / f"{library}.map"
    names = sorted(set().union(*versions.values()))
    source.write_text("".join(map(_definition, names)))
    numbered = [f"{v} {{ global: {'; '.join(found)}; }};" for v, found in versions.items() if v]
    script.write_text("\n".join(numbered))
    options = [f"-Wl,-soname,{library}"] + [f"-Wl,--version-script={script}"] * bool(numbered)
    run(compiler, "-shared", "-fPIC", "-O0", *options, source, "-o", folder / library)


def _definition(name: str) -> str:
    if name.startswith("_ZTV"):  # a virtual table
        return f"void *{name}[64];\n"
    if name.startswith("_ZTI"):  # a type's information, in which pybind11 looks up its name
        return f'void *{name}[8] = {{0, "{name.removeprefix("_ZTI")}"}};\n'
    if name == REFERENCE:
        return f"void *{name}(void) {{ static void *checker; return &checker; }}\n"
    return f"int {name}(void) {{ return {0 if name.startswith('_Z') else NO_DEVICE}; }}\n"


def _loaded(folder: Path, run: Run) -> tuple[set[Path], set[str]]:
    """(torch's libraries that `import torch` loads, names of the absent ones that they ask for)."""
    system = run("/sbin/ldconfig", "-p")
    loaded: set[Path] = set()
    missing: set[str] = set()
    names = set(LOADED_FIRST)
    while names:
        path = folder / names.pop()
        if path.exists():
            loaded.add(path)
            names |= set(re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", path)))
            names -= missing | {other.name for other in loaded}
        elif f"\t{path.name} " not in system:
            missing.add(path.name)
    return loaded, missing


def _files_of_versions(library: Path, run: Run) -> dict[str, str]:
    """For each version of symbols that ``library`` asks for, the file that has to define it."""
    files, file = {}, ""
    for line in run("readelf", "-V", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            file = found[1]
        elif found := re.search(r"Name: (\S+)\s+Flags", line):
            files[found[1]] = file
    return files
