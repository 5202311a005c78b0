"""A process that compiles attention and one that loads it from Numba's cache give the same bits.

What the first calls is linked among all that it has compiled, and what the second calls is what lay
in one file. So the order of a sum must not be LLVM's to choose for each.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from begun import template
from processors import HASWELL

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "sglang_ascend/ops/attention/numba.py"
PROGRAM = """
import hashlib, json
import torch
import attention

torch.manual_seed(0)
bits = {}
for query_len in (1, 2, 4):
    for length in (5, 37, 40, 64, 300):
        for width, value_dim in ((80, 64), (64, None)):
            query, cache = torch.randn(query_len, 8, width), torch.randn(512, 1, width)
            pages = torch.arange(512)[None], torch.tensor([length])
            found = attention.paged_gqa(
                query, cache, cache, *pages,
                query_len=query_len, page_size=1, scale=0.1, value_dim=value_dim,
            )
            name = f"{query_len} rows over {length} keys of {width}"
            bits[name] = hashlib.md5(found.numpy().tobytes()).hexdigest()
print(json.dumps(bits))
"""
PROCESSORS = pytest.mark.parametrize("processor", [{}, HASWELL], ids=["this one", "AVX2"])
# What takes the place of ``softmax``: a sum and a product that LLVM may order as it likes. Around
# calls of the C library's exponential it chooses another order when it loads, with AVX-512 and with
# AVX2 alone; around ours, of which it makes vectors, with AVX-512 only.
IN_ANY_ORDER = """
from sglang_ascend.ops.numba_floats import FAST


@njit(fastmath=FAST, error_model="numpy")
def softmax(scores):
    highest = np.float32(-np.inf)
    for j in range(len(scores)):
        highest = max(highest, scores[j])
    total = np.float32(0.0)
    for j in range(len(scores)):
        below = scores[j] - highest
        weight = np.float32(math.exp(below)) * np.float32(below > LEAST)
        scores[j] = weight
        total += weight
    for j in range(len(scores)):
        scores[j] /= total


"""


def bits_of_two_starts(
    folder: Path, attention: str, processor: dict[str, str]
) -> list[dict[str, str]]:
    """Of a process that finds nothing of this module compiled, and of the next one."""
    (folder / "attention.py").write_text(attention, encoding="utf-8")
    paths = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, **processor, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": paths}
    starts = [template().run_text(PROGRAM, [], environment, 300) for _ in range(2)]
    assert not any(done.returncode for done in starts), starts
    return [json.loads(done.stdout) for done in starts]


@PROCESSORS
def test_compiled_and_loaded_attention_give_the_same_bits(processor, tmp_path):
    source = SOURCE.read_text(encoding="utf-8")
    compiled, loaded = bits_of_two_starts(tmp_path, source, processor)
    assert compiled == loaded


@PROCESSORS
def test_the_control_a_sum_in_any_order_is_found(processor, tmp_path):
    source = SOURCE.read_text(encoding="utf-8")
    softmax = r"@njit[^\n]*\ndef softmax.*?\n\n\n"
    wrong, count = re.subn(softmax, IN_ANY_ORDER.lstrip(), source, flags=re.DOTALL)
    assert count == 1
    compiled, loaded = bits_of_two_starts(tmp_path, wrong, processor)
    assert compiled != loaded
