"""Triton's kernels keep what sorting would, read the logits once and little more, and compile.

They run in Triton's interpreter, which is where their loads are counted; nothing here is a time.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kept_tokens import differences, random_rows, rule_of

from sglang_ascend.ops import sampling
from sglang_ascend.ops.sampling import triton
from sglang_ascend.ops.sampling.threshold import GROUP_SIZE

pytestmark = pytest.mark.usefixtures("triton_interpreter")

VOCAB_SIZE = 129280  # DeepSeek-V3's


@pytest.fixture
def small_capacity(monkeypatch):
    """Candidates of 2 groups instead of 128, so that short rows outgrow them too."""
    monkeypatch.setattr(triton, "CAPACITY", 2)
    monkeypatch.setattr(triton, "TILE", 2)


JOINT = pytest.mark.parametrize("joint", [False, True], ids=["in turn", "joint"])


@JOINT
def test_the_kernels_keep_what_sorting_keeps(joint):
    rule = rule_of("triton", joint)
    for num_rows, vocab_size in ((3, 1), (6, 2), (16, 40), (10, 65), (4, 1000)):
        rows = random_rows(num_rows, vocab_size, seed=2)
        assert differences(rule, *rows, joint) == (0, 0)


@JOINT
def test_the_kernels_bisect_a_row_that_outgrows_their_candidates(small_capacity, joint):
    rows = random_rows(5, 300, seed=3)
    assert differences(rule_of("triton", joint), *rows, joint) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernels_keep_what_sorting_keeps_in_many_rows(dtype):
    """A tenth of them asks for top_p = 1 - 2^-24, which sums of fp32 hardly tell from 1."""
    sizes = ((300, 5), (200, 70), (50, 1000), (4, 20000), (2, VOCAB_SIZE))
    found = [
        differences(rule_of("triton"), *random_rows(num_rows, vocab_size, 4, dtype))
        for num_rows, vocab_size in sizes
    ]
    wrong, excused = np.sum(found, axis=0)
    assert wrong == 0
    assert excused < 0.03 * sum(num_rows for num_rows, _ in sizes)


@pytest.mark.slow
def test_the_kernels_bisect_many_rows_that_outgrow_their_candidates(small_capacity):
    wrong, excused = differences(rule_of("triton"), *random_rows(60, 900, seed=5))
    assert wrong == 0
    assert excused < 3


def count_loads(monkeypatch, tensor: torch.Tensor) -> np.ndarray:
    """int [rows], which from now on grows by the bytes that kernels load from each row."""
    from triton.runtime.interpreter import InterpreterBuilder

    counted, load = np.zeros(len(tensor), np.int64), InterpreterBuilder.create_masked_load
    row_bytes = tensor.element_size() * tensor.shape[1]

    def load_and_count(builder, pointers, mask, *options):
        offsets = pointers.data.astype(np.int64) - tensor.data_ptr()
        within = mask.data & (offsets >= 0) & (offsets < len(tensor) * row_bytes)
        np.add.at(counted, offsets[within] // row_bytes, tensor.element_size())
        return load(builder, pointers, mask, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load_and_count)
    return counted


def bytes_read(monkeypatch, dtype: torch.dtype, top_ks: list, times: int = 1):
    """By the filter of each row, in units of one read of it."""
    generator = torch.Generator().manual_seed(8)
    logits = (3 * torch.randn(len(top_ks), VOCAB_SIZE, generator=generator)).to(dtype)
    loaded = count_loads(monkeypatch, logits)
    top_ps = torch.tensor([0.95, 1.0] * len(top_ks))[: len(top_ks)]
    for _ in range(times):
        sampling.top_k_top_p.implementation("triton")(logits, torch.tensor(top_ks), top_ps)
    return loaded / (VOCAB_SIZE * logits.element_size())


@pytest.mark.parametrize(
    ("dtype", "top_ks"), [(torch.float32, [1, 20, 50, 64]), (torch.bfloat16, [64])]
)
def test_the_kernels_read_the_logits_once_and_a_tenth(monkeypatch, dtype, top_ks):
    """As loads are counted where the interpreter performs them, a second pass would show."""
    ratios = bytes_read(monkeypatch, dtype, top_ks)
    assert (ratios >= 1).all()
    assert (ratios <= 1.10).all()


def test_a_second_read_would_be_counted(monkeypatch):
    """The control: the filter of the same rows once more."""
    ratios = bytes_read(monkeypatch, torch.float32, [20], times=2)
    assert (ratios >= 2).all()


def gathers_stay_inside(monkeypatch, vocab_size: int) -> bool:
    """Whether the groups that a program gathers lie in its row, those too that a mask excludes."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, outside = InterpreterBuilder.create_masked_load, []
    logits, top_ks, top_ps = random_rows(12, vocab_size, seed=6)
    row_bytes = vocab_size * logits.element_size()

    def load_and_look(builder, pointers, *options):
        if pointers.data.ndim == 2:
            row = builder.grid_idx[0]
            rows = (pointers.data.astype(np.int64) - logits.data_ptr()) // row_bytes
            outside.append((rows != row).any())
        return load(builder, pointers, *options)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", load_and_look)
        sampling.top_k_top_p.implementation("triton")(logits, top_ks, top_ps)
    assert outside
    return not any(outside)


def is_taken_on_npu(vocab_size: int) -> bool:
    x = torch.empty(2, vocab_size)
    npu = SimpleNamespace(type="npu")
    logits = SimpleNamespace(dtype=x.dtype, shape=x.shape, stride=x.stride, device=npu)
    return triton.accepts_rows(logits) and triton.accepts_filters(logits)


@pytest.mark.parametrize("num_groups", [1, 17, 63, 64, 65, 128, 129, 200])
def test_what_a_mask_excludes_lies_in_the_row_too(monkeypatch, num_groups):
    """For triton-ascend reads it. Rows up to 128 groups have no more than are candidates, and are
    not bisected."""
    assert is_taken_on_npu(num_groups * GROUP_SIZE)
    assert gathers_stay_inside(monkeypatch, num_groups * GROUP_SIZE)


@pytest.mark.parametrize("vocab_size", [100, 4100, 12900])
def test_the_control_a_part_of_a_group_is_read_beyond_and_not_taken(monkeypatch, vocab_size):
    assert not is_taken_on_npu(vocab_size)
    assert not gathers_stay_inside(monkeypatch, vocab_size)


def test_the_control_a_tile_longer_than_the_candidates_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "CAPACITY", 32)
    with pytest.raises(Exception, match="shorter than a tile"):
        gathers_stay_inside(monkeypatch, 40 * GROUP_SIZE)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_ascend.ops.sampling import triton_filter_kernels, triton_kernels

pointers = dict(logits=sys.argv[1], top_ks="*i32", cuts="*i32", counts="*i32", candidates="*i32")
sizes = dict(stride="i64", vocab_size="i32", num_groups="i32", num_tiles="i32",
             tiles_per_part="i32")
constants = dict(BLOCK=4096, JOINT=True, GROUP=64, TILE=64, CAPACITY=128, GROUPS=2048, TILES=32)
for kernel in (triton_kernels.stream, triton_kernels.bound, triton_kernels.refine,
               triton_filter_kernels.weigh):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else
             {**pointers, **sizes}.get(name, "*fp32") for name in names}
    values = {name: constants[name] for name in names if name in constants}
    compiled = triton.compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, ".target sm_90" in compiled.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("logits", ["*fp32", "*fp16", "*bf16"])
def test_the_kernels_compile_as_well_as_they_interpret(logits, tmp_path):
    """The interpreter lets pass what the compiler does not, such as a name of two shapes."""
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path))
    del environment["TRITON_INTERPRET"]
    compiling = subprocess.run(
        [sys.executable, "-c", COMPILE, logits], env=environment, capture_output=True, text=True
    )
    assert compiling.stdout.split("\n")[:4] == [
        "stream True",
        "bound True",
        "refine True",
        "weigh True",
    ], compiling.stderr
