"""Builds what stands in CANN's place: the emulated runtime in acl/, and for every other name that
the installed torch_npu needs a stub that counts itself and succeeds."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from npu_emulation.cuda_stubs import build_cuda_stubs

SOURCES = Path(__file__).parent / "acl"

# Opened by torch_npu at run time; those that it is linked with its ELF headers name.
OPENED_BY_NAME = (
    "libopapi.so",
    "libcust_opapi.so",
    "libnnopbase.so",
    "libmsprofiler.so",
    "libascend_hal.so",
    "libruntime.so",
    "libascend_ml.so",
    "libascend_dump.so",
    "libhcomm.so",
)
CANN_NAME = re.compile(rb"\0((?:acl[a-z]*[A-Z]|Hccl[A-Z]|rt[A-Z])[A-Za-z0-9_]+)(?=\0)")
RUNTIME = "libascendcl.so"
COMPILE = ["-std=gnu11", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-deprecated-declarations"]


class BuildError(RuntimeError):
    """The libraries cannot be made here."""


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"{name} is not installed here: run scripts/npu_emulation.sh.")
    return Path(spec.origin).parent


def _run(*command: str | Path) -> str:
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if finished.returncode:
        raise BuildError(f"{command[0]} failed while building the emulated NPU: {finished.stderr}")
    return finished.stdout


def _symbols(library: Path, which: str, *options: str) -> set[str]:
    lines = _run("nm", *options, which, library).splitlines()
    return {
        line.split()[-1].split("@")[0] for line in lines if " w " not in line and line.split()[1:]
    }


def _linked_libraries(library: Path) -> set[str]:
    return set(re.findall(r"NEEDED.*\[(.*?)\]", _run("readelf", "-d", library)))


def torch_npu_libraries() -> list[Path]:
    folder = package_folder("torch_npu")
    return [*folder.glob("_C*.so"), *(folder / "lib").glob("*.so")]


def _provided_elsewhere(libraries: list[Path]) -> set[str]:
    """Names that torch, Python or the system have."""
    providers = [*libraries, *(package_folder("torch") / "lib").glob("*.so*"), Path(sys.executable)]
    system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
    for line in _run("/sbin/ldconfig", "-p").splitlines():
        if line.split() and line.split()[0] in system:
            providers.append(Path(line.split()[-1]))
    return set().union(*(_symbols(path, "--defined-only", "-D") for path in providers))


def missing_functions() -> tuple[set[str], set[str]]:
    """(names that torch_npu is linked with, names that it looks up) and that CANN provides."""
    libraries = torch_npu_libraries()
    undefined = set().union(*(_symbols(path, "--undefined-only", "-D") for path in libraries))
    linked = {
        name
        for name in undefined - _provided_elsewhere(libraries)
        if not name.startswith(("Py", "_Py"))
    }
    looked_up = set()
    for path in libraries:
        looked_up |= {name.decode() for name in CANN_NAME.findall(path.read_bytes())}
    return linked, looked_up - linked


def missing_libraries() -> list[str]:
    libraries = torch_npu_libraries()
    present = {path.name for path in libraries}
    needed = set().union(*map(_linked_libraries, libraries)) - present
    torch_libraries = {path.name for path in (package_folder("torch") / "lib").glob("*.so*")}
    cann = [name for name in needed - torch_libraries if not re.search(r"\.so\.\d", name)]
    return sorted({*cann, *OPENED_BY_NAME} - {RUNTIME})


def stub_source(functions: set[str]) -> str:
    """C text: an operator's second phase is a launch; all else succeeds and counts itself."""
    launches = {
        name.removesuffix("GetWorkspaceSize") for name in functions if name.startswith("aclnn")
    }
    others = sorted(name for name in functions if not name.startswith("aclnn"))
    lines = ["void count_launch(const char *name);"]
    for name in sorted(launches):
        lines.append(f"int {name}GetWorkspaceSize(void) {{ return 0; }}")
        lines.append(f'int {name}(void) {{ count_launch("{name}"); return 0; }}')
    for name in others:
        lines.append(f"static long calls_{name}; long {name}(void) {{ calls_{name}++; return 0; }}")
    entries = ", ".join(f'{{"{name}", &calls_{name}}}' for name in others)
    lines.append(f"static struct {{ const char *name; long *calls; }} stubs[] = {{ {entries} }};")
    lines.append("const char *npu_emulation_stub_name(int i)")
    lines.append("{ return i < (int)(sizeof stubs / sizeof *stubs) ? stubs[i].name : 0; }")
    lines.append("long npu_emulation_stub_calls(int i) { return *stubs[i].calls; }")
    return "\n".join(lines) + "\n"


def _compiler() -> str:
    for candidate in (os.environ.get("CC", ""), "gcc", "cc", "clang"):
        if candidate and shutil.which(candidate):
            return candidate
    raise BuildError("a C compiler is needed and none was found: install gcc or name one with CC=.")


def _compile_runtime(folder: Path) -> list[Path]:
    """The objects of acl/*.c, against the ACL headers that torch_npu brings."""
    include = package_folder("torch_npu") / "include"
    objects = []
    for source in sorted(SOURCES.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        _run(_compiler(), *COMPILE, f"-I{include}", "-c", source, "-o", objects[-1])
    return objects


def _contents_hash() -> str:
    digest = hashlib.sha256()
    metadata = next(package_folder("torch_npu").parent.glob("torch_npu-*.dist-info/RECORD"))
    code = [Path(__file__), Path(__file__).with_name("cuda_stubs.py"), *sorted(SOURCES.iterdir())]
    for path in [metadata, *code]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build(folder: Path) -> None:
    """Make the libraries in `folder`, unless what they are made from has not changed."""
    done = folder / "built-from"
    wanted = _contents_hash()
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    objects = _compile_runtime(folder)
    implemented = set().union(*(_symbols(path, "--defined-only") for path in objects))
    linked, looked_up = missing_functions()
    stubs = folder / "stubs.c"
    stubs.write_text(stub_source((linked | looked_up) - implemented))
    shared = [_compiler(), "-shared", "-fPIC", "-O0"]
    runtime = folder / RUNTIME
    _run(*shared, f"-Wl,-soname,{RUNTIME}", *objects, stubs, "-pthread", "-o", runtime)
    for name in missing_libraries():
        link = [f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        _run(*shared, *link, f"-L{folder}", "-lascendcl", "-o", folder / name)
    provided = _provided_elsewhere(torch_npu_libraries())
    build_cuda_stubs(folder, package_folder("torch") / "lib", provided, _compiler(), _run)
    done.write_text(wanted)
