"""An MTP layer that runs without SGLang's modules around its products gives SGLang's logits,
hidden states, keys and values: bit for bit where it computes all rows piece by piece, and up to
roundings where it is one compiled call or drops all but the last rows behind their keys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from launched_server import greedy
from server_pairs import TEST_TIMEOUT_S, plain_and_mtp
from server_pool import ServerPool
from serving_prompts import lossless_mix
from watched_acceptance import with_parts

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(TEST_TIMEOUT_S),
    pytest.mark.parametrize("model", ["smollm2-mtp", "nano-deepseek"]),
]


def test_a_step_drafts_by_the_forward_that_sglang_has(
    servers: ServerPool, model_folder: Path, tokenizer, held_out_prompts, tmp_path: Path
) -> None:
    config = with_parts(
        plain_and_mtp(model_folder)[1],
        "compare_forwards",
        COMPARED=str(tmp_path),
        # Rows of one step that the MTP layer skipped are caught up by the next.
        SGLANG_ASCEND_LOOKUP_DRAFTS="7",
    )
    (server,) = servers.get(config)
    mix = lossless_mix(tokenizer, held_out_prompts, 64)
    prompts = mix[::8]
    server.generate_each(prompts, greedy(24), 8)
    # 32 that arrive together, so that 17 of them meet however fast they are served.
    server.generate(mix[::2], greedy(40))
    found = forwards(tmp_path)
    counts = Counter((mode, batch_size) for mode, _, batch_size, *_ in found)
    compiled = Counter((mode, is_compiled) for mode, _, _, is_compiled, _ in found)
    print(counts, compiled)
    is_compiled = model_folder.name == "nano-deepseek"
    modes = {"EXTEND", "DRAFT_EXTEND_V2", "DECODE"} | ({"CHAIN"} if is_compiled else set())
    assert {mode for mode, _ in counts} == modes
    of_several = sum(n for (_, batch_size), n in counts.items() if int(batch_size) >= 3)
    assert min(of_several, counts["DECODE", "1"]) > 5
    if is_compiled:
        # One request's rows are compiled on every processor, 17 requests' on none.
        assert min(compiled[mode, "True"] for mode in ("DECODE", "DRAFT_EXTEND_V2")) > 5
        assert min(compiled[mode, "False"] for mode in ("DECODE", "DRAFT_EXTEND_V2")) > 2
    assert {are_equal for *_, are_equal in found} == {"True"}
    (tmp_path / "mistake").touch()
    server.generate_each(prompts, greedy(24), 8)
    assert "True" not in {are_equal for *_, are_equal in forwards(tmp_path)}


def forwards(folder: Path) -> list[list[str]]:
    """Those since the last call."""
    file = folder / "forwards"
    lines = file.read_text().splitlines()
    file.unlink()
    return [line.split() for line in lines]
