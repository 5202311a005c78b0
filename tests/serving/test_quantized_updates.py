"""A server of quantized weights takes those of another folder, of any layout, or keeps its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched_server import LaunchedServer, Reply, greedy
from offline_model import ALL_ROWS, OfflineModel, largest_difference
from quantized_checkpoints import DESCRIPTION, Write, write_decoded
from safetensors.torch import load_file, save_file
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix
from test_quantized import MAX_DIFFERENCE
from torch import Tensor

NEW_TOKENS = 24
O_PROJ = "model.layers.{}.self_attn.o_proj"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["nano-deepseek"]),
]

Prompts = list[list[int]]
Change = Callable[[dict[str, Tensor], dict[str, str]], None]


@pytest.fixture
def prompts(tokenizer, held_out_prompts) -> Prompts:
    return lossless_mix(tokenizer, held_out_prompts, 24)[:12]


@pytest.fixture
def server(servers: ServerPool, write: Write) -> LaunchedServer:
    return servers.get_flushed(plain_and_mtp(write("gptq"))[1])[0]


def ask(server: LaunchedServer, prompts: Prompts, **fields: Any) -> list[Reply]:
    server.flush_cache()
    return server.generate(prompts, greedy(NEW_TOKENS), **fields)


def tokens_of(replies: list[Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


def test_an_update_serves_the_weights_of_another_layout_and_of_a_float_mtp_layer(
    server: LaunchedServer,
    write: Write,
    model_folder: Path,
    quantized_folder: Path,
    prompts: Prompts,
) -> None:
    decoded = {
        layout: write_decoded(model_folder, quantized_folder / f"{layout}-before-updates", layout)
        for layout in ("gptq", "W8A16")
    }
    offline = {layout: OfflineModel(folder, layout) for layout, folder in decoded.items()}

    def error(layout: str, replies: list[Reply]) -> float:
        return largest_difference(map(offline[layout].rows_of, prompts, replies))

    before = ask(server, prompts, **ALL_ROWS)
    assert error("gptq", before) < MAX_DIFFERENCE
    server.update_weights(write("W8A16"))
    int8 = ask(server, prompts, **ALL_ROWS)
    assert error("W8A16", int8) < MAX_DIFFERENCE < error("gptq", int8)
    server.update_weights(write("W8A16", mtp=False))
    assert tokens_of(ask(server, prompts)) == tokens_of(int8)
    server.update_weights(distort_mtp_scales(write("W8A16", mtp_scales_of_layer=1)))
    wrong = ask(server, prompts)
    assert tokens_of(wrong) == tokens_of(int8)
    assert tokens_per_step(wrong) < 0.97 * tokens_per_step(int8)
    server.update_weights(model_folder)
    assert tokens_of(ask(server, prompts)) != tokens_of(before)
    server.update_weights(write("gptq"))
    after = ask(server, prompts)
    assert tokens_of(after) == tokens_of(before)
    assert tokens_per_step(after) == tokens_per_step(before)


def distort_mtp_scales(folder: Path) -> Path:
    """In place: every other row of each matrix of the layer counts for eight times as much."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.4.") and name.endswith("weight_scale"):
            tensor[::2] *= 8
    save_file(tensors, file)
    return folder


def lose_a_scale(tensors: dict[str, Tensor], types: dict[str, str]) -> None:
    del tensors[f"{O_PROJ.format(1)}.weight_scale"]


def halve_a_target_linear(tensors: dict[str, Tensor], types: dict[str, str]) -> None:
    for name in types:
        if name.startswith(O_PROJ.format(3)):
            tensors[name] = tensors[name][:128].clone()


def round_inputs_of_the_mtp_layer_beside_offsets(
    tensors: dict[str, Tensor], types: dict[str, str]
) -> None:
    """What no operator multiplies, found when the target has its weights already."""
    module = O_PROJ.format(4)
    for name in types:
        if name.startswith(module):
            types[name] = "W8A8_DYNAMIC"
    tensors[f"{module}.weight_offset"].fill_(1)


REFUSED = {
    "lacks a scale": (lose_a_scale, "weight_scale"),
    "has another shape": (halve_a_target_linear, r"o_proj has 256 outputs .* 128 in all"),
    "has no operator": (
        round_inputs_of_the_mtp_layer_beside_offsets,
        "no operator multiplies int8 weights .* with per_token int8 inputs",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_folder_that_cannot_be_served_leaves_the_former_weights(
    server: LaunchedServer, write: Write, prompts: Prompts, mistake: str, tmp_path: Path
) -> None:
    change, reason = REFUSED[mistake]
    before = ask(server, prompts)
    source = write("W8A16")
    for path in source.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    types = json.loads((source / DESCRIPTION).read_text())
    change(tensors, types)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / DESCRIPTION).write_text(json.dumps(types))
    response = server.post("/update_weights_from_disk", model_path=str(tmp_path))
    assert response.status_code == 400
    message = response.json()["message"]
    assert re.search(reason, message) and "\n" not in message
    after = ask(server, prompts)
    assert tokens_of(after) == tokens_of(before)
    assert tokens_per_step(after) == tokens_per_step(before)
