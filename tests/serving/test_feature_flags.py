"""Features that the server must be started with change no reply, with speculation as without.

The oracle is the server without speculation; flags that can be combined share a server.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launched_server import LaunchedServer, Reply, ServerConfig, greedy
from reference_model import ReferenceModel
from safetensors.torch import load_file, save_file
from server_pairs import TEST_TIMEOUT_S, ask_both, plain_and_mtp, tokens_per_step
from server_pool import ServerPool
from serving_prompts import lossless_mix

# Chunks smaller than most prompts, and the running requests decode in the same forward.
MIXED = ("--chunked-prefill-size", "32", "--enable-mixed-chunk")
ONE_AT_A_TIME = ("--max-running-requests", "1", "--enable-priority-scheduling")
SYNCHRONOUS = ("--disable-overlap-schedule", "--disable-radix-cache")
# As commands for other devices have it.
NEXTN = """--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1
    --speculative-num-draft-tokens 4""".split()

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


def pair_with(folder: Path, flags: tuple[str, ...]) -> tuple[ServerConfig, ServerConfig]:
    """Without and with speculation; the later of two equal flags counts."""
    plain, mtp = (
        replace(config, flags=(*config.flags, *flags)) for config in plain_and_mtp(folder)
    )
    return plain, mtp


def tokens_of(replies: list[Reply]) -> Prompts:
    return [reply.tokens for reply in replies]


def mixed_steps(replies: list[Reply]) -> int:
    """Tokens that no verification gave: prefill gives the first, a mixed forward one more each. A
    reply without any verification has no counts."""
    counts = "spec_num_correct_drafts", "spec_verify_ct"
    verified = sum(reply.meta.get(count, 0) for reply in replies for count in counts)
    return sum(len(reply.tokens) - 1 for reply in replies) - verified


@pytest.mark.parametrize("variant", ["nextn"])
def test_a_command_with_nextn_is_served_by_mtp(
    servers: ServerPool, model_folder: Path, prompts: Prompts, variant: str
) -> None:
    plain = plain_and_mtp(model_folder)[0]
    pair = servers.get(plain, replace(plain, flags=(*plain.flags, *NEXTN)))
    expected, found = ask_both(
        pair, lambda server: server.generate_each(prompts, greedy(60), len(prompts))
    )
    assert tokens_of(found) == tokens_of(expected)
    assert tokens_per_step(found) > 1.3
    assert "--speculative-algorithm NEXTN is served as MTP on this platform." in pair[1].log()


@pytest.mark.parametrize("variant", ["mixed chunk"])
def test_mixed_chunks_change_no_token(
    servers: ServerPool, model_folder: Path, prompts: Prompts, variant: str
) -> None:
    plain, mixed = servers.get(plain_and_mtp(model_folder)[0], pair_with(model_folder, MIXED)[1])
    expected, found = ask_both(
        [plain, mixed], lambda server: server.generate_each(prompts, greedy(60), len(prompts))
    )
    assert tokens_of(found) == tokens_of(expected)
    assert mixed.info()["enable_mixed_chunk"] is True
    assert max(mixed.logged_prefill_tokens()) <= 32 + len(prompts)
    assert mixed_steps(found) > 0, "no request decoded in a forward that also prefilled"
    assert tokens_per_step(found) > 1.3


@pytest.mark.parametrize("variant", ["mixed chunk"])
def test_a_grammar_holds_in_mixed_chunks(
    servers: ServerPool, model_folder: Path, prompts: Prompts, variant: str
) -> None:
    """Requests with grammars decode while long prompts are prefilled beside them."""
    plain, mixed = servers.get(plain_and_mtp(model_folder)[0], pair_with(model_folder, MIXED)[1])
    long = [prompt * (300 // len(prompt) + 1) for prompt in prompts[8:]]
    chosen = [prompt for pair in zip(prompts[:8], long, strict=False) for prompt in pair]
    pattern = {"temperature": 0, "regex": "It is [0-9]{2}( or [0-9]{2}){0,6}[.]"}
    samplings = [pattern if i % 2 == 0 else greedy(8) for i in range(len(chosen))]

    def ask(server: LaunchedServer) -> list[Reply]:
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(lambda p, s: server.generate([p], s)[0], chosen, samplings))

    expected, found = ask_both([plain, mixed], ask)
    assert tokens_of(found) == tokens_of(expected)
    assert mixed_steps(found[::2]) > 0, "no grammar was in a forward that also prefilled"


@pytest.mark.parametrize("variant", ["priority"])
def test_a_preempted_request_goes_on_with_the_same_tokens(
    servers: ServerPool, model_folder: Path, prompts: Prompts, variant: str
) -> None:
    """Room for one: the urgent request takes it while the other has hundreds of tokens to go."""
    plain, mtp = servers.get(*pair_with(model_folder, ONE_AT_A_TIME))
    (long,) = plain.generate(prompts[:1], greedy(900))
    (urgent,) = plain.generate(prompts[1:2], greedy(9))

    with ThreadPoolExecutor(1) as pool:
        decodes = len(mtp.logged_batch_sizes("Decode"))
        slow = pool.submit(mtp.generate, [prompts[0]], greedy(900), priority=0)
        while len(mtp.logged_batch_sizes("Decode")) <= decodes:
            assert not slow.done()
        (fast,) = mtp.generate([prompts[1]], greedy(9), priority=100)
        assert not slow.done(), "the urgent request waited"
        (preempted,) = slow.result()
    assert fast.tokens == urgent.tokens
    assert preempted.tokens == long.tokens
    mtp.flush_cache()


@pytest.mark.parametrize("variant", ["synchronous"])
def test_without_overlap_and_radix_cache_no_token_changes(
    servers: ServerPool, model_folder: Path, prompts: Prompts, variant: str
) -> None:
    pair = servers.get(*pair_with(model_folder, SYNCHRONOUS))
    plain, mtp = ask_both(pair, lambda server: server.generate_each(prompts, greedy(60), 8))
    assert tokens_of(plain) == tokens_of(mtp)
    assert pair[1].info()["disable_overlap_schedule"] is True
    assert all(reply.cached_tokens == 0 for reply in mtp)
    assert tokens_per_step(mtp) > 1.3


@pytest.mark.parametrize("variant", ["synchronous"])
def test_a_prompt_of_embeddings_gives_the_tokens_of_its_ids(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    reference: ReferenceModel,
    variant: str,
) -> None:
    """SGLang takes embeddings without radix cache only."""
    pair: list[LaunchedServer] = servers.get(*pair_with(model_folder, SYNCHRONOUS))
    table = reference.model.get_input_embeddings().weight
    chosen = prompts[:4]
    expected = pair[0].generate(chosen, greedy(24))
    for server in pair:
        for prompt, whole in zip(chosen, expected, strict=True):
            embeddings = table[prompt].tolist()
            response = server.post("/generate", input_embeds=embeddings, sampling_params=greedy(24))
            assert response.status_code == 200, response.text[:500]
            assert response.json()["output_ids"] == whole.tokens


@pytest.mark.parametrize("variant", ["synchronous"])
def test_prompts_of_embeddings_and_of_ids_are_served_at_once(
    servers: ServerPool,
    model_folder: Path,
    prompts: Prompts,
    reference: ReferenceModel,
    variant: str,
) -> None:
    """SGLang gives a batch of both the rows of the embeddings alone."""
    pair: list[LaunchedServer] = servers.get(*pair_with(model_folder, SYNCHRONOUS))
    table = reference.model.get_input_embeddings().weight
    expected = tokens_of(pair[0].generate(prompts[:8], greedy(24)))
    bodies: list[dict[str, Any]] = [
        {"input_embeds": table[prompt].tolist()} if i % 2 else {"input_ids": prompt}
        for i, prompt in enumerate(prompts[:8])
    ]
    for server in pair:
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = [
                pool.submit(server.post, "/generate", sampling_params=greedy(24), **body)
                for body in bodies
            ]
        assert [request.result().json()["output_ids"] for request in asked] == expected
        assert max(server.logged_batch_sizes("Prefill")) > 1


@pytest.mark.parametrize("variant", ["tokenizers"])
def test_http_processes_beside_each_other_know_the_algorithm_and_judge_requests(
    servers: ServerPool, model_folder: Path, prompts: Prompts, variant: str
) -> None:
    """SGLang loads no plugin in them: they knew no MTP, and no server started."""
    plain, mtp = plain_and_mtp(model_folder)
    several = replace(mtp, flags=(*mtp.flags, "--tokenizer-worker-num", "2"))
    pair = servers.get(plain, several)
    expected, found = ask_both(pair, lambda server: server.generate_each(prompts, greedy(40), 8))
    assert tokens_of(found) == tokens_of(expected)
    assert tokens_per_step(found) > 1.3
    for _ in range(8):  # whichever process takes it
        refused = pair[1].post("/generate", input_ids=[10**9], sampling_params=greedy(2))
        assert refused.status_code == 400
        assert "which is no token of this model" in refused.text


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
    cut.update_weights(empty_head)
    silent = cut.generate(prompts, greedy(40))
    assert {token for reply in silent for token in reply.tokens} == {0}
    assert tokens_per_step(silent) > 3.5, "the drafts are not those of the new head"
    cut.update_weights(folder)
    after = cut.generate(prompts, greedy(40))
    assert tokens_of(after) == tokens_of(expected)
    assert 1.3 < tokens_per_step(after) == tokens_per_step(before)
