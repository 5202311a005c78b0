"""A patched function of SGLang does what our hook does, and leaves other devices as they were.

The function is cut out of the patched file and run by itself, in a namespace of stand-ins.
"""

from __future__ import annotations

import inspect
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from patch_set import ROWS, cut_out, patched_files


@pytest.fixture
def patched(tmp_path):
    def load(number: str, name: str, **namespace: Any) -> Any:
        (row,) = (row for row in ROWS if row["file"].startswith(number))
        (path,) = patched_files(row, tmp_path)
        return cut_out(path.read_text(encoding="utf-8"), name, namespace)

    return load


def platform(*, supports_triton: bool = False, out_of_tree: bool = True) -> SimpleNamespace:
    calls: list[str] = []
    return SimpleNamespace(
        capabilities=SimpleNamespace(supports_triton=supports_triton),
        is_out_of_tree=lambda: out_of_tree,
        get_device=lambda device_id: torch.device("cpu"),
        empty_cache=lambda: calls.append("empty_cache"),
        synchronize=lambda: calls.append("synchronize"),
        calls=calls,
    )


def reserve_arguments() -> dict[str, Any]:
    return {
        "req_pool_indices": torch.tensor([4, 0, 2]),
        "req_to_token": torch.full((6, 12), -1, dtype=torch.int32),
        "start_offset": torch.tensor([0, 6, 1]),
        "end_offset": torch.tensor([3, 6, 8]),
        "out_cache_loc": torch.arange(100, 110),
        "batch_size": 3,
    }


def test_0001_writes_what_our_hook_writes(patched):
    from sglang_ascend.plugin.replacements import assign_req_to_token_pool

    name = "assign_req_to_token_pool_func"
    function = patched("0001", name, torch=torch, _is_cpu=False, current_platform=platform())
    theirs, ours = reserve_arguments(), reserve_arguments()
    function(**theirs)
    assign_req_to_token_pool(**ours)
    assert torch.equal(theirs["req_to_token"], ours["req_to_token"])
    assert theirs["req_to_token"][4, :4].tolist() == [100, 101, 102, -1]
    assert theirs["req_to_token"][2, :9].tolist() == [-1, *range(103, 110), -1]


def test_0001_still_launches_the_kernel_where_there_is_triton(patched):
    launched: list[Any] = []
    kernel = {(3,): lambda *arguments: launched.append(arguments)}
    function = patched(
        "0001",
        "assign_req_to_token_pool_func",
        torch=torch,
        _is_cpu=False,
        current_platform=platform(supports_triton=True),
        assign_req_to_token_pool=kernel,
        next_power_of_2=lambda number: 4,
    )
    function(**reserve_arguments())
    assert len(launched) == 1


def test_0003_shares_the_weights_and_asks_the_platform(patched):
    asked = platform()
    function = patched("0003", "set_embed_and_head", current_platform=asked)
    model = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=SimpleNamespace(weight=0)),
        lm_head=SimpleNamespace(weight=0),
    )
    function(model, "embed", "head")
    assert (model.model.embed_tokens.weight, model.lm_head.weight) == ("embed", "head")
    assert asked.calls == ["empty_cache", "synchronize"]


@pytest.mark.sglang
@pytest.mark.parametrize(("out_of_tree", "declared"), [(True, []), (False, ["intel_amx"])])
def test_0005_leaves_the_backend_to_an_out_of_tree_platform(
    patched, monkeypatch, out_of_tree, declared
):
    from sglang.srt import platforms

    stub = platform(out_of_tree=out_of_tree)
    monkeypatch.setattr(platforms, "current_platform", stub, raising=False)
    written: list[dict] = []
    function = patched(
        "0005",
        "handle_cpu_backends",
        Any=Any,
        resolving_view=lambda server_args: server_args,
        declare_resolution=lambda server_args, source, **fields: written.append(fields),
        is_host_cpu_arm64=lambda: False,
    )
    function(SimpleNamespace(device="cpu", attention_backend=None))
    assert [row["attention_backend"] for row in written if "attention_backend" in row] == declared
    assert {"sampling_backend": "pytorch"} in written


def test_0006_gives_a_custom_algorithm_what_core_calls(patched):
    base = patched("0006", "CustomSpecAlgo", torch=torch)
    like_eagle = type("LikeEagle", (base,), {"is_eagle": lambda self: True})
    answers = {
        cls: (cls("X", None).need_topk(), cls("X", None).carries_draft_hidden_states())
        for cls in (base, like_eagle)
    }
    assert answers == {base: (False, False), like_eagle: (True, True)}
    assert callable(base.create_future_map)


def test_0007_returns_a_name_that_can_be_split(patched):
    no = {f"is_{name}": lambda: False for name in ("cpu", "npu", "habana_available", "musa", "mps")}
    stub = SimpleNamespace(device=torch.device)
    function = patched("0007", "get_device", torch=stub, current_platform=platform(), **no)
    assert function() == "cpu"


@pytest.mark.parametrize(("on_npu", "method"), [(False, "MLA"), (True, "MHA_NPU")])
def test_0010_keeps_npu_methods_for_the_npu(patched, on_npu, method):
    methods = SimpleNamespace(MLA="MLA", MHA_NPU="MHA_NPU", MLA_NPU="MLA_NPU", DSA_NPU="DSA_NPU")
    mode = SimpleNamespace(
        is_extend=lambda: True, is_target_verify=lambda: False, is_draft_extend_v2=lambda: False
    )
    name = "handle_attention_ascend"
    function = patched("0010", name, _is_npu=on_npu, AttnForwardMethod=methods)
    assert function(SimpleNamespace(), SimpleNamespace(forward_mode=mode)) == method


@pytest.mark.parametrize("ids", [[0, 49], [50], [-1, 3], [3, 2**40], [], None])
@pytest.mark.parametrize("from_client", [True, False])
def test_0011_refuses_what_our_hook_refuses(patched, ids, from_client):
    from sglang_ascend.plugin.request_checks import refuse_unknown_token_ids

    class Passed(Exception):
        """Raised by what comes after the check."""

    def go_on(*arguments: Any) -> None:
        raise Passed

    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    theirs = patched(
        "0011", "_validate_one_request", get_exec=lambda: SimpleNamespace(features=features)
    )
    manager = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=50), _validate_joint_schema_request=lambda *_: None
    )
    # Reading the context length is the first thing after the check.
    manager_class = type("Manager", (SimpleNamespace,), {"context_len": property(go_on)})
    request = SimpleNamespace(input_ids=ids if from_client else None)
    refused = bool(from_client and ids and not all(0 <= token < 50 for token in ids))
    with pytest.raises(ValueError if refused else Passed):
        theirs(manager_class(**vars(manager)), request, ids)
    with pytest.raises(ValueError if refused else Passed):
        refuse_unknown_token_ids(go_on, manager, request, ids)


@pytest.mark.sglang
@pytest.mark.parametrize("ids", [[0, 49], [50], [-1, 3], [2**40], [], None])
@pytest.mark.parametrize("min_new_tokens", [0, 1])
def test_0012_refuses_what_our_hook_refuses(patched, ids, min_new_tokens):
    from sglang.srt.sampling import sampling_params

    from sglang_ascend.plugin.request_checks import refuse_unknown_stop_tokens

    theirs = patched("0012", "verify", **vars(sampling_params))
    params = sampling_params.SamplingParams(stop_token_ids=ids, min_new_tokens=min_new_tokens)
    refused = bool(min_new_tokens and ids and not all(0 <= token < 50 for token in ids))
    wrong = pytest.raises(ValueError, match="stop_token_ids") if refused else nullcontext()
    with wrong:
        theirs(params, 50)
    with wrong:
        refuse_unknown_stop_tokens(lambda *arguments: None, params, 50)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_0014_copies_slot_numbers_only_where_they_are_on_a_device(patched, device):
    sent: list[dict[str, Any]] = []
    on_host = MagicMock(__len__=lambda self: 3)
    event = SimpleNamespace(record=lambda stream: None)
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda: None)
    function = patched(
        "0014",
        "_send_kv_chunk",
        torch=SimpleNamespace(empty=lambda *shape, **options: on_host, cuda=cuda),
        get_parallel=lambda: SimpleNamespace(enable_dsa_cache_layer_split=False),
        kv_to_page_indices=lambda indices, page_size: indices.numpy(),
    )
    sender = SimpleNamespace(
        supports_host_tensor_indices=True,
        kv_mgr=SimpleNamespace(enable_all_cp_ranks_for_transfer=False),
        get_max_transfer_tokens=lambda: None,
        should_send_kv_chunk=lambda count, last: True,
        send=lambda pages, state, **options: sent.append({"pages": pages, **options}),
    )
    scheduler = SimpleNamespace(
        enable_staging=False,
        disagg_prefill_pending_chunk_rids=set(),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(12, device=device).view(2, 6)),
        token_to_kv_pool_allocator=SimpleNamespace(
            page_size=1, translate_kv_indices_for_transfer=lambda indices: indices
        ),
    )
    req = SimpleNamespace(
        rid="0",
        kv=SimpleNamespace(req_pool_idx=1),
        start_send_idx=2,
        origin_input_ids=[0] * 6,
        disagg_kv_sender=sender,
    )
    function(scheduler, req, end_idx=5)
    (message,) = sent
    assert message["num_kv_tokens"] == 3
    if device == "cpu":
        assert message["pages"].tolist() == [8, 9, 10] and "indices_event" not in message
    else:
        assert message["pages"] is on_host and message["indices_event"] is event


@pytest.mark.sglang
def test_0015_hashes_what_our_hook_hashes(patched):
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
def test_0016_seeds_a_batch_that_our_hook_seeds(patched, backend):
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
def test_0017_draws_what_our_hook_draws(patched, min_p):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers import sampler

    from sglang_ascend.plugin.request_seeds import draw_by_token

    theirs = patched("0017", "top_k_top_p_min_p_sampling_from_probs_torch", **vars(sampler))
    probs = torch.randn(500, 12).softmax(-1)
    top_ks = torch.full((500,), 4)
    seeds, positions = torch.arange(500), torch.arange(500) * 3
    arguments = top_ks, torch.ones(500), torch.full((500,), min_p), min_p > 0, seeds, positions
    found = theirs(probs.clone(), *arguments)
    assert torch.equal(found, draw_by_token(theirs, probs.clone(), *arguments).to(found.dtype))
    assert found.unique().numel() > 6
    unfiltered = torch.full((500,), 12), *arguments[1:2], torch.zeros(500), False, *arguments[4:]
    assert torch.equal(
        theirs(probs.clone(), *unfiltered).long(),
        sampler.multinomial_with_seed(probs.double().log(), seeds, positions).view(-1),
    )


@pytest.mark.sglang
def test_0018_stops_where_our_hook_stops(patched):
    from sglang.srt.managers import schedule_batch

    from sglang_ascend.plugin.emitted_text import settle_token_by_token

    names = ("update_finish_state", "_update_finish_state_by_token")
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
        request.tokenizer = letters
        request.output_ids.extend(tokens)
        update(request, len(tokens))
        return request.finished_reason, list(request.output_ids_through_stop)

    def ours(request: Any, count: int) -> None:
        settle_token_by_token(unpatched, request, count)

    for text in (b"xay", b"xya", b"aay", b"x\0a", b"xyz", b"wxyz", b"wxvz"):
        found = settle(theirs, theirs.update_finish_state, list(text))
        expected = settle(schedule_batch.Req, ours, list(text))
        assert str(found) == str(expected) or (
            found[1] == expected[1] and found[0].to_json() == expected[0].to_json()
        )
    assert settle(theirs, theirs.update_finish_state, list(b"xay"))[1] == list(b"xa")
    assert settle(schedule_batch.Req, unpatched, list(b"xay"))[1] == list(b"xay")


@pytest.mark.sglang
@pytest.mark.parametrize("text", ["", "世�", "世a�", "a b�", "a\nb�", "a世b c�", "�", "abc"])
def test_0019_prints_what_our_hook_prints(patched, text):
    from sglang import utils

    from sglang_ascend.plugin.emitted_text import find_printable_text

    assert patched("0019", "find_printable_text", **vars(utils))(text) == find_printable_text(text)


@pytest.mark.parametrize(
    ("up_to", "committed", "finished", "pairs"),
    [(15, 15, True, True), (15, 15, True, False), (15, 15, False, True), (16, 16, True, True)],
)
@pytest.mark.sglang
def test_0020_inserts_what_our_hook_inserts(patched, up_to, committed, finished, pairs):
    from sglang_ascend.plugin.prefix_cache import pair_with_last_token

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

    from sglang_ascend.plugin.prompt_embeddings import pass_embeddings

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
