"""Int8 weights give the same greedy tokens whatever instructions the integer products may use.

Processors are stood in for by limits, as in ``test_exact_on_any_processor``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched_server import Reply, greedy
from processors import without
from quantized_checkpoints import Write
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import lossless_mix

NEW_TOKENS = 32
LIMITS = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    # Of Numba's the integer products' alone: with shorter vectors attention has other sums.
    "AVX2 and no VNNI for Numba": {"ONEDNN_MAX_CPU_ISA": "AVX2", **without("avx512vnni")},
}
# Float attention in another order of sums: rounded inputs turn over.
OTHER_FLOATS = {"ATEN_CPU_CAPABILITY": "avx2"}

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]

Prompts = list[list[int]]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 50)


@pytest.fixture(scope="module")
def known_replies() -> dict[Path, list[Reply]]:
    """What the processor says without a limit, by folder, asked once."""
    return {}


@pytest.fixture
def folder(write: Write) -> Path:
    return write("W8A8_DYNAMIC")


@pytest.fixture
def expected(
    servers: ServerPool, folder: Path, prompts: Prompts, known_replies: dict[Path, list[Reply]]
) -> list[Reply]:
    if folder not in known_replies:
        known_replies[folder] = ask(servers, folder, prompts, {})
    return known_replies[folder]


def ask(servers: ServerPool, folder: Path, prompts: Prompts, limits: dict[str, str]) -> list[Reply]:
    """One at a time: a batch is a sum of another order."""
    config = replace(plain_and_mtp(folder)[0], variables=tuple(limits.items()))
    (server,) = servers.get(config)
    return server.generate_each(prompts, greedy(NEW_TOKENS), 1, return_logprob=True)


def logprobs_of(replies: list[Reply]) -> list[list[float]]:
    return [reply.output_logprobs.values for reply in replies]


@pytest.mark.parametrize("limits", LIMITS)
def test_greedy_replies_do_not_change(
    servers: ServerPool,
    folder: Path,
    prompts: Prompts,
    expected: list[Reply],
    tmp_path: Path,
    limits: str,
) -> None:
    """Not a token, and not a bit of a log-probability."""
    # Kernels that were compiled for other limits lie in another cache.
    variables = LIMITS[limits] | {"NUMBA_CACHE_DIR": str(tmp_path)}
    found = ask(servers, folder, prompts, variables)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
    assert logprobs_of(found) == logprobs_of(expected)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="PyTorch has AVX2 here anyway"
)
def test_other_float_sums_are_seen(
    servers: ServerPool, folder: Path, prompts: Prompts, expected: list[Reply]
) -> None:
    """The control of what compares replies."""
    assert logprobs_of(ask(servers, folder, prompts, OTHER_FLOATS)) != logprobs_of(expected)


@pytest.mark.parametrize("limits", LIMITS)
def test_doctor_names_the_body_and_the_verdicts(limits: str, tmp_path: Path, model: str) -> None:
    environment = {**os.environ, **LIMITS[limits], "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "sglang_ascend", "doctor", "--json"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    sections = json.loads(said)["sections"]
    bodies = {row["body"]: row for row in sections["Integer products on CPU"]}
    assert bodies["numba"] == {"body": "numba", "compared with int64": "exact", "chosen": "yes"}
    assert bodies["fbgemm"]["compared with int64"] and bodies["fbgemm"]["chosen"] == "no"
    chosen = {row["operator"]: row["implementation"] for row in sections["Operators"]}
    assert chosen["quantized.integer_linear"] == "numba"
