"""What needs a server of its own changes no reply, with speculation as without.

The oracle is the server without speculation.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launched_server import LaunchedServer, Reply, greedy
from safetensors.torch import load_file, save_file
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix

Prompts = list[list[int]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 24)


def tokens_of(replies: list[Reply]) -> Prompts:
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("variant", ["a draft vocabulary"])
def test_a_weight_update_reaches_the_head_of_a_draft_vocabulary(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    tmp_path: Path,
    variant: str,
) -> None:
    """The rows of the draft vocabulary are a copy: with a head of zeros both models say token 0."""
    folder = shutil.copytree(model_folder, tmp_path / "cut")
    vocabulary = {"token_ids": list(range(0, 4096, 2))}
    (folder / "draft_vocabulary.json").write_text(json.dumps(vocabulary))
    empty_head = shutil.copytree(folder, tmp_path / "empty-head")
    tensors = load_file(empty_head / "model.safetensors")
    tensors["lm_head.weight"] *= 0
    save_file(tensors, empty_head / "model.safetensors", metadata={"format": "pt"})
    cut, whole = servers.get(plain_and_mtp(folder)[1], plain_and_mtp(model_folder)[0])

    expected, before = ask_both([whole, cut], lambda s: s.generate(prompts, greedy(40)))
    assert tokens_of(before) == tokens_of(expected)
    update_weights(cut, empty_head)
    silent = cut.generate(prompts, greedy(40))
    assert {token for reply in silent for token in reply.tokens} == {0}
    assert tokens_per_step(silent) > 3.5, "the drafts are not those of the new head"
    update_weights(cut, folder)
    after = cut.generate(prompts, greedy(40))
    assert tokens_of(after) == tokens_of(expected)
    assert 1.3 < tokens_per_step(after) == tokens_per_step(before)


def update_weights(server: LaunchedServer, folder: Path) -> None:
    response = server.post("/update_weights_from_disk", model_path=str(folder))
    assert response.status_code == 200 and response.json()["success"], response.text
