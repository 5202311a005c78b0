"""What recipes write is served as it decodes: smoothed, rotated, packed, and with int4 inputs.

The oracle is transformers in float64 over the weights that `convert --to float32` gives, its inputs
rounded by the definition, behind a rotation that the test makes by itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest
from launched_server import Reply, greedy
from offline_model import ALL_ROWS, MAX_KL, OfflineModel, mean_kl
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix
from test_quantized import MAX_TIE, command, same_but_for_ties

NEW_TOKENS = 12
# A layout of quantized_checkpoints whose inputs are rounded alike, and one that differs in that.
RECIPES = {
    "w8a8-flex": ("W8A8_DYNAMIC", "W8A8 rotated"),
    "w8a8-rotated": ("W8A8 rotated", "W8A8_DYNAMIC"),
    "w4a16": ("W8A16", "W8A8_DYNAMIC"),
    "w4a4": ("W4A4", "W8A8 rotated"),
}
COUNTS = {
    "w8a8-flex": "131 of W8A8_DYNAMIC",
    "w8a8-rotated": "131 of W8A8_DYNAMIC_ROTATED",
    "w4a16": "126 of W4A16 group g32",
    "w4a4": "96 of W4A4_DYNAMIC_ROTATED, 35 of W8A8_DYNAMIC_ROTATED",
}

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]

Prompts = list[list[int]]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 50)[:16]


def written(model_folder: Path, out: Path, recipe: str) -> tuple[Path, Path]:
    """The quantized folder and the float32 one of the same values."""
    few = ["--calibration-texts", "8"] if recipe == "w8a8-flex" else []
    command("quantize", str(model_folder), "--recipe", recipe, "--out", str(out / recipe), *few)
    command("convert", str(out / recipe), str(out / f"{recipe}-decoded"), "--to", "float32")
    return out / recipe, out / f"{recipe}-decoded"


def check(recipe: str, decoded: Path, prompts: Prompts, replies: list[Reply]) -> None:
    layout, other = RECIPES[recipe]
    offline, wrong = OfflineModel(decoded, layout), OfflineModel(decoded, other)
    pairs = [*map(offline.rows_of, prompts, replies)]
    found = mean_kl(pairs)
    rows = [*map(wrong.rows_of, prompts[:4], replies[:4])]
    print(f"KL(served, offline) of {recipe}: {found:.1e}; inputs rounded otherwise: ", end="")
    print(f"{mean_kl(rows):.1e}; median prompt: {median(mean_kl([pair]) for pair in pairs):.1e}")
    if recipe == "w4a4":  # a rounding to int4 that turns over stays in the cache, as in block FP8
        assert median(mean_kl([pair]) for pair in pairs) < MAX_KL
    else:
        assert found < MAX_KL
        for reply, (_, expected) in zip(replies, pairs, strict=True):
            for token, row in zip(reply.tokens, expected[-len(reply.tokens) :], strict=True):
                assert float(row.max() - row[token]) < MAX_TIE
    with offline.scales_off_by_one_row():  # the control
        assert mean_kl(map(offline.rows_of, prompts[:4], replies[:4])) > 10 * MAX_KL


def test_int4_experts_and_rotated_inputs_are_served_with_mtp(
    servers: ServerPool, model_folder: Path, prompts: Prompts, tmp_path: Path
) -> None:
    folder, decoded = written(model_folder, tmp_path, "w4a4")
    (server,) = servers.get_flushed(plain_and_mtp(folder)[1])
    replies = server.generate(prompts[:8], greedy(NEW_TOKENS), **ALL_ROWS)
    check("w4a4", decoded, prompts[:8], replies)
    assert tokens_per_step(replies) > 1.5
    (said,) = re.findall(r"Quantized linears \(.*", server.log())
    assert all(part in said for part in COUNTS["w4a4"].split(", "))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w8a8-flex", "w8a8-rotated", "w4a16"])
def test_what_a_recipe_writes_is_served_without_and_with_mtp(
    servers: ServerPool, model_folder: Path, prompts: Prompts, tmp_path: Path, recipe: str
) -> None:
    folder, decoded = written(model_folder, tmp_path, recipe)
    pair = servers.get_flushed(*plain_and_mtp(folder))
    plain, mtp = ask_both(
        pair, lambda server: server.generate(prompts, greedy(NEW_TOKENS), **ALL_ROWS)
    )
    for replies in (plain, mtp):
        check(recipe, decoded, prompts, replies)
    assert same_but_for_ties(plain, mtp)
    assert not same_but_for_ties(plain, [*mtp[1:], mtp[0]])  # the control: others' replies
    assert tokens_per_step(mtp) > 1.5
    assert f"{COUNTS[recipe]}" in pair[1].log()
