"""Patches of what a user gets back (draws, text, cached tokens): each does what our hook does."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch


@pytest.mark.sglang
def test_0015_hashes_what_our_sampler_hashes(patched):
    from sglang_ascend.ops.sampling import murmur_hash32

    theirs = patched("0015", "_murmur_hash32_torch", torch=torch)
    # SGLang's issue 25106 found this triple, whose hash is the largest of all.
    seed, position, token = (torch.tensor([number]) for number in (7847, 12345, 1208))
    assert theirs(seed.to(torch.uint64), position, token).item() == 2**32 - 1
    seeds, positions = torch.randint(2**62, (2, 16))
    tokens = torch.arange(40)
    found = theirs(seeds.to(torch.uint64), positions, tokens)
    assert torch.equal(found.long(), murmur_hash32(seeds, positions, tokens).long())


def batch_with_seeds(*seeds: int | None) -> MagicMock:
    from sglang.srt.sampling.sampling_params import SamplingParams

    reqs = [MagicMock(sampling_params=SamplingParams(sampling_seed=seed)) for seed in seeds]
    for req in reqs:
        req.return_sampling_mask = req.return_sampling_support_logprobs = False
        req.custom_logit_processor = None
    return MagicMock(reqs=reqs, device="cpu")


@pytest.mark.sglang
@pytest.mark.parametrize("backend", ["pytorch", "flashinfer"])
def test_0016_seeds_the_batches_that_we_seed(patched, backend):
    from sglang.srt.sampling import sampling_batch_info as module

    settings = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        kernel=SimpleNamespace(sampling_backend=backend),
        features=SimpleNamespace(enable_custom_logit_processor=False),
    )
    namespace = vars(module) | {"get_exec": lambda: settings, "random": random}
    make = patched("0016", "from_schedule_batch", **namespace)

    def seeds(*given: int | None) -> list[int] | None:
        info = make(module.SamplingBatchInfo, batch_with_seeds(*given), 9)
        return None if info.sampling_seed is None else info.sampling_seed.tolist()

    assert seeds(None, None) is None
    if backend == "flashinfer":  # which has no kernel for seeds
        assert seeds(7) is None
    else:
        assert seeds(7, 8) == [7, 8]
        seed, drawn = seeds(7, None)
        assert seed == 7 and drawn not in (42, 7)


@pytest.mark.sglang
def test_0016_gives_both_batches_seeds_or_neither(patched):
    from sglang.srt.sampling import sampling_batch_info as module

    merge = patched("0016", "merge_batch", **vars(module))

    def info(seeds: list[int] | None) -> Any:
        ones = torch.ones(2)
        made = module.SamplingBatchInfo(
            temperatures=ones[:, None],
            top_ps=ones,
            top_ks=ones.int(),
            min_ps=ones,
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=False,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            vocab_size=9,
            penalizer_orchestrator=MagicMock(),
            device="cpu",
        )
        made.sampling_seed = seeds and torch.tensor(seeds)
        return made

    for left, right in (([1, 2], None), (None, [1, 2])):
        merged = info(left)
        merge(merged, info(right))
        assert len(merged.sampling_seed) == 4
        assert merged.sampling_seed.tolist()[slice(0, 2) if left else slice(2, 4)] == [1, 2]
    merged = info(None)
    merge(merged, info(None))
    assert merged.sampling_seed is None


@pytest.mark.sglang
@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_0017_draws_what_our_sampler_draws(patched, monkeypatch, min_p):
    from sglang.srt.layers import sampler

    from sglang_ascend.ops.sampling import murmur_hash32
    from sglang_ascend.plugin.requests.seeds import SeededSampler

    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)
    in_float64 = inspect.unwrap(sampler.multinomial_with_seed)
    namespace = vars(sampler) | {"multinomial_with_seed": in_float64}
    theirs = patched("0017", "top_k_top_p_min_p_sampling_from_probs_torch", **namespace)
    probs = torch.randn(500, 12).softmax(-1)
    top_ks, top_ps, min_ps = torch.full((500,), 4), torch.ones(500), torch.full((500,), min_p)
    seeds, positions = torch.arange(500), torch.arange(500) * 3
    found = theirs(probs.clone(), top_ks, top_ps, min_ps, min_p > 0, seeds, positions)
    filters = {"top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    info = SimpleNamespace(**filters, sampling_seed=seeds, sampling_mask_batch_indices=None)
    ours, _ = SeededSampler._sample_from_probs(MagicMock(), probs.clone(), info, positions, False)
    assert torch.equal(found, ours.to(found.dtype))
    assert found.unique().numel() > 6
    unfiltered = torch.full((500,), 12), top_ps, torch.zeros(500), False, seeds, positions
    assert torch.equal(
        theirs(probs.clone(), *unfiltered).long(),
        in_float64(probs.double().log(), seeds, positions).view(-1),
    )


@pytest.mark.sglang
def test_0018_stops_where_our_hook_stops(patched):
    from sglang.srt.managers import schedule_batch

    from sglang_ascend.plugin.requests.emitted_text import settle_token_by_token

    names = (
        "update_finish_state",
        "_update_finish_state",
        "_update_finish_state_by_token",
    )
    methods = {name: patched("0018", name, **vars(schedule_batch)) for name in names}
    theirs = type("Patched", (schedule_batch.Req,), methods)
    unpatched = inspect.unwrap(schedule_batch.Req.update_finish_state)
    letters = SimpleNamespace(
        encode=lambda text, **options: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(),
        eos_token_id=0,
        additional_stop_token_ids=None,
    )

    def settle(kind: type, update: Any, tokens: list[int]) -> Any:
        params = schedule_batch.SamplingParams(max_new_tokens=9, stop=["y", "a"])
        params.normalize(letters)
        request = kind("0", "", [5, 6], params, vocab_size=128)
        request.tokenizer, request.session = letters, "a session"
        request.output_ids.extend(tokens)
        request.update_reasoning_tokens(tokens, [ord("x")])
        update(request, len(tokens))
        reason = request.finished_reason
        return reason and reason.to_json(), list(request.output_ids), request.reasoning_tokens

    def ours(request: Any, count: int) -> None:
        settle_token_by_token(unpatched, request, count)

    for text in (b"xay", b"xya", b"aay", b"x\0a", b"xyz", b"wxyz", b"wxvz", b"wax", b"w\0vx"):
        found = settle(theirs, theirs.update_finish_state, list(text))
        expected = settle(schedule_batch.Req, ours, list(text))
        assert found == expected
    assert settle(theirs, theirs.update_finish_state, list(b"xay"))[1] == list(b"xa")
    assert settle(schedule_batch.Req, unpatched, list(b"xay"))[1] == list(b"xay")


@pytest.mark.sglang
@pytest.mark.parametrize("text", ["", "世�", "世a�", "a b�", "a\nb�", "a世b c�", "�", "abc"])
def test_0019_prints_what_our_hook_prints(patched, text):
    from sglang import utils

    from sglang_ascend.plugin.requests.emitted_text import find_printable_text

    assert patched("0019", "find_printable_text", **vars(utils))(text) == find_printable_text(text)


@pytest.mark.parametrize(
    ("up_to", "committed", "finished", "pairs"),
    [(15, 15, True, True), (15, 15, True, False), (15, 15, False, True), (16, 16, True, True)],
)
@pytest.mark.sglang
def test_0020_inserts_what_our_hook_inserts(patched, up_to, committed, finished, pairs):
    from sglang_ascend.plugin.requests.prefix_cache import pair_with_last_token

    theirs = patched("0020", "checkpoint_into_tree")
    tokens = MagicMock()
    request = SimpleNamespace(
        origin_input_ids=[0] * 10,
        output_ids_through_stop=[1] * 6,
        full_untruncated_fill_ids=tokens,
        finished=lambda: finished,
        kv=SimpleNamespace(kv_committed_len=committed),
    )
    tree = SimpleNamespace(is_eagle=pairs)
    cache = SimpleNamespace(tree_core=tree, disable=True, _components_tuple=())
    theirs(cache, request, up_to=up_to)
    (found,) = (call.args[0].stop for call in tokens.__getitem__.call_args_list)
    ours: list[int] = []
    pair_with_last_token(
        lambda self, req, *, up_to: ours.append(up_to), cache, request, up_to=up_to
    )
    assert [found] == ours


@pytest.mark.sglang
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_draft", [False, True])
def test_0021_passes_what_our_hook_passes(patched, dtype, is_draft):
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ascend.plugin.requests.prompt_embeddings import pass_embeddings

    runner = SimpleNamespace(
        dtype=dtype,
        is_draft_worker=is_draft,
        is_generation=True,
        _pp_kwargs=lambda tensors: {"pp_proxy_tensors": tensors},
    )
    unpatched = inspect.unwrap(ModelRunner._extend_forward_kwargs)
    theirs = patched("0021", "_extend_forward_kwargs")
    for embeddings in (torch.ones(2, 3), None):
        batch = SimpleNamespace(input_embeds=embeddings, replace_embeds=None)
        expected = theirs(runner, batch, 7)
        found = pass_embeddings(unpatched(runner, batch, 7), runner, batch, 7)
        assert found.keys() == expected.keys()
        assert ("input_embeds" in found) == (embeddings is not None and not is_draft)
        if "input_embeds" in found:
            assert found["input_embeds"].dtype == expected["input_embeds"].dtype == dtype


@pytest.mark.sglang
@pytest.mark.parametrize("given", [False, True])
def test_0022_and_our_forward_mask_position_0_as_sglang_does(patched, monkeypatch, given):
    from sglang.srt.layers.layer_boundary import residual
    from sglang.srt.models.mimo_mtp import MiMoMultiTokenPredictorLayer

    from sglang_ascend.plugin.npu.models import mimo_mtp_forward

    torch.manual_seed(0)
    table, positions = torch.randn(9, 4), torch.tensor([0, 1, 2, 0, 5])
    seen = SimpleNamespace(
        start=lambda batch: None,
        fold=lambda hidden_states, batch: hidden_states,
        take_output=lambda hidden_states, batch: hidden_states,
    )
    monkeypatch.setattr(residual, "batch", seen)
    layer = SimpleNamespace(
        embed_tokens=lambda ids: table[ids].clone(),
        hidden_layernorm=torch.sin,
        token_layernorm=torch.cos,
        input_proj=lambda both: both.cumsum(-1),
        mtp_block=lambda positions, hidden_states, forward_batch: (
            hidden_states + positions[:, None]
        ),
        final_layernorm=torch.tanh,
    )
    batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=torch.randn(5, 4)))
    ids = torch.tensor([1, 3, 5, 7, 8])

    def run(forward: Any) -> torch.Tensor:
        embeds = table[ids + 0] * 2 if given else None
        return forward(layer, ids, positions, batch, embeds)

    unpatched = inspect.unwrap(MiMoMultiTokenPredictorLayer.forward)
    namespace = {**unpatched.__globals__, "residual_batch": seen}
    monkeypatch.setitem(unpatched.__globals__, "residual_batch", seen)
    expected = run(unpatched)
    assert not torch.equal(
        expected, run(lambda *args: unpatched(*args[:2], positions + 1, *args[3:]))
    )
    assert torch.equal(run(mimo_mtp_forward), expected)
    theirs = patched("0022", "MiMoMultiTokenPredictorLayer.forward", **namespace)
    assert torch.equal(run(theirs), expected)


@pytest.mark.sglang
def test_0023_copies_the_lengths_from_pinned_memory(patched, monkeypatch):
    """As our hook, where the platform has it; what is reserved stays the same."""
    from sglang.srt import utils

    pinned: list[bool] = []
    monkeypatch.setattr(utils, "is_pin_memory_available", lambda device: device == "npu")
    made = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return made(*args, **kwargs)

    reserved: list[tuple[list[int], list[int]]] = []
    function = patched(
        "0023",
        "eagle_prepare_for_decode",
        torch=SimpleNamespace(tensor=tensor, int32=torch.int32),
        get_alloc_reserve_per_decode=lambda: 8,
        page_aligned_decode_alloc_lens=lambda requests, reserve, page_size: ([3], [16], 13),
        alloc_for_spec_decode=lambda *args, cur_kv_lens, nxt_kv_lens, **kwargs: reserved.append(
            (cur_kv_lens.tolist(), nxt_kv_lens.tolist())
        ),
    )
    batch = MagicMock(
        device="npu", seq_lens_cpu=made([3]), reqs=[SimpleNamespace(decode_batch_idx=0)]
    )
    batch.token_to_kv_pool_allocator.page_size = 1
    batch.sampling_info.penalizer_orchestrator.is_required = False
    made_on_host = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
    function(batch)
    monkeypatch.setattr(torch.Tensor, "to", made_on_host)
    assert pinned == [True, True]
    assert reserved == [([3], [16])]


@pytest.mark.sglang
@pytest.mark.parametrize(("starts", "ends"), [([3, 16], [9, 17]), ([15, 1, 32], [33, 16, 32])])
def test_0024_and_our_hook_count_the_pages_that_begin(patched, starts, ends):
    """The oracle: the first slots of pages that lie between the lengths. Neither asks the device,
    whose lengths are wrong here."""
    from sglang_ascend.plugin.npu.scheduling import count_pages_on_host

    page_size, wrong = 16, torch.zeros(len(starts), dtype=torch.int64)
    begun = sum(
        position % page_size == 0
        for start, end in zip(starts, ends, strict=True)
        for position in range(start, end)
    )
    lens = wrong, torch.tensor(starts), wrong, torch.tensor(ends), None, 0
    asked: list[int] = []
    allocator = SimpleNamespace(roundup=page_size - 1, page_size=page_size)
    count_pages_on_host(lambda *args: asked.append(args[-1]), allocator, *lens)
    assert asked == [begun]

    fewer = SimpleNamespace(**vars(allocator), debug_mode=False, free_pages=list(range(begun - 1)))
    fewer.merge_and_sort_free = lambda: asked.append(-1)
    assert patched("0024", "alloc_extend", torch=torch)(fewer, *lens) is None
    assert asked == [begun, -1]


@pytest.mark.sglang
def test_0025_draws_what_our_sampler_draws_where_float64_is_missing(patched):
    from sglang.srt.layers import sampler

    from sglang_ascend.ops.sampling import murmur_hash32
    from sglang_ascend.plugin.requests.seeds import draw

    float32_only = SimpleNamespace(**{**vars(torch), "float64": torch.float32})
    namespace = vars(sampler) | {"torch": float32_only, "murmur_hash32": murmur_hash32}
    theirs = patched("0025", "multinomial_with_seed", **namespace)
    logprobs, seeds, positions = (
        torch.randn(500, 70).log_softmax(-1),
        *torch.arange(1000).view(2, -1),
    )
    found = theirs(logprobs, seeds, positions)
    assert torch.equal(found[:, 0], draw(logprobs.exp(), seeds, positions).long())
    assert found.unique().numel() > 60
