"""The requirement files are SGLang's own list, less what is left out by name, and all is pinned."""

from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_ascend.plugin.compat import SUPPORTED_TORCH
from sglang_ascend.stack import STACKS

FOLDER = Path(__file__).parents[1] / "requirements"

# Needed only beside a CUDA device, or to read sound, video or another transport.
LEFT_OUT = {
    "cuda-python",
    "deepseek-recipe",
    "flash-attn-4",
    "flashinfer-python",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvidia-ml-py",
    "nvshmem4py-cu13",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "smg-grpc-servicer",
    "tilelang",
    "tml-renderers",
    "torch-memory-saver",
    "torchaudio",
    "torchcodec",
}
# Present in another version than SGLang asks for: torch is torch_npu's, tvm-ffi is xgrammar's.
OTHER_VERSION = {"torch", "apache-tvm-ffi"}


def read(name: str) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in (FOLDER / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def wanted_by_sglang() -> dict[str, Requirement]:
    found = [Requirement(line) for line in requires("sglang") or []]
    here = [item for item in found if item.marker is None or item.marker.evaluate({"extra": ""})]
    return {canonicalize_name(item.name): item for item in here}


def pins() -> dict[str, str]:
    constraints = read("constraints-cpu.txt")
    versions = {name: str(item.specifier) for name, item in constraints.items()}
    assert all(version.startswith("==") for version in versions.values())
    return {name: version.removeprefix("==") for name, version in versions.items()}


def test_every_requirement_of_sglang_is_pinned_or_left_out_by_name():
    wanted = set(wanted_by_sglang())
    assert wanted - set(pins()) == LEFT_OUT
    assert LEFT_OUT & (set(read("sglang-0.5.23-cpu.txt")) | set(read("no-deps.txt"))) == set()


def test_every_pin_satisfies_sglang():
    versions = pins()
    wrong = {
        name: f"{versions[name]} is not {item.specifier}"
        for name, item in wanted_by_sglang().items()
        if name in versions and not item.specifier.contains(versions[name], prereleases=True)
    }
    assert set(wrong) == OTHER_VERSION, wrong


def test_everything_that_make_installs_is_pinned():
    listed = {**read("sglang-0.5.23-cpu.txt"), **read("no-deps.txt")}
    assert set(listed) - set(pins()) == set()
    assert [
        name for name, item in listed.items() if not item.specifier.contains(pins()[name])
    ] == []


def test_kernels_are_lowered_by_the_versions_of_an_ascend_machine():
    lowering, machine = read("triton-ascend.txt"), read("npu.txt")
    assert all(str(item.specifier).startswith("==") for item in lowering.values())
    shared = {"triton-ascend", "pybind11"}
    assert {name: lowering[name] for name in shared} == {name: machine[name] for name in shared}


def test_nothing_that_would_replace_torch_is_installed_with_its_dependencies():
    assert {"timm", "torchvision", "sglang"} <= set(read("no-deps.txt"))
    assert set(read("sglang-0.5.23-cpu.txt")) & set(read("no-deps.txt")) == set()


def test_the_emulated_npu_has_the_pinned_versions():
    emulated = read("npu-emulated.txt")
    assert emulated["torch-npu"] == read("npu.txt")["torch-npu"]
    assert set(emulated) - {"torch-npu"} <= set(pins())


def test_the_other_torch_of_the_emulated_npu_is_that_of_sglangs_own_stacks():
    other = {name: str(item.specifier) for name, item in read("npu-torch-2.10.txt").items()}
    assert set(other) == {"torch", "torch-npu", "torchvision"}
    used = [stack.versions for stack in STACKS if "SGLang" in stack.publisher]
    assert len(used) == 2
    for versions in used:
        assert other["torch"].startswith(f"=={versions['torch']}.")
        assert other["torch-npu"].startswith(f"=={versions['torch_npu']}.post")


def test_a_server_starts_under_the_torch_of_every_known_stack_and_no_older_one():
    assert {stack.versions["torch"] for stack in STACKS} <= set(SUPPORTED_TORCH)
    assert "2.9" not in SUPPORTED_TORCH
