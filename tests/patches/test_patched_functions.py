"""A patched function of SGLang does what our hook does, and leaves other devices as they were.

The function is cut out of the patched file and run by itself, in a namespace of stand-ins.
"""

from __future__ import annotations

import math
import numbers
import re
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch


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
    from sglang_ascend.plugin.cpu.replacements import assign_req_to_token_pool

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


@pytest.mark.sglang
@pytest.mark.parametrize("ids", [[0, 49], [50], [-1, 3], [3, 2**40], [], None])
@pytest.mark.parametrize("from_client", [True, False])
def test_0011_refuses_what_our_hook_refuses(patched, ids, from_client):
    refused = ids == [] or bool(from_client and ids and not all(0 <= token < 50 for token in ids))
    judge_request(patched, {"input_ids": ids if from_client else None}, ids, refused)


@pytest.mark.sglang
@pytest.mark.parametrize("session", [{"id": "one"}, None])
def test_0011_refuses_no_tokens_where_no_session_has_others(patched, session):
    judge_request(patched, {"input_ids": None, "session_params": session}, [], not session)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"top_logprobs_num": 50}, False),
        ({"top_logprobs_num": 51}, True),
        ({"logprob_start_len": -1}, False),
        ({"logprob_start_len": -2}, True),
        ({"positional_embed_overrides": {"5": [0.5]}}, True),
        ({"input_embeds": [[0.5] * 8, [1.0] * 8]}, False),
        ({"input_embeds": [[0.5] * 8, [1.0] * 7]}, True),
        ({"input_embeds": [[0.5] * 7 + [float("nan")]]}, True),
        ({"sampling_params": {"stop_regex": "a+"}}, False),
        ({"sampling_params": {"stop_regex": ["a+", "("]}}, True),
        ({"sampling_params": {"stop_regex": "a{99999999999999999999}"}}, True),
        ({"sampling_params": {"stop_regex": "(" * 999}}, False),  # by its length, elsewhere
        ({"sampling_params": {"stop_regex": 5}}, False),  # by its type, elsewhere
        ({"sampling_params": {"stop_regex": [5, "("]}}, True),
    ],
)
def test_0011_refuses_other_fields_that_our_hook_refuses(patched, fields, is_refused):
    judge_request(patched, {"input_ids": None} | fields, None, is_refused)


def judge_request(
    patched: Any, fields: dict[str, Any], ids: list[int] | None, refused: bool
) -> None:
    """By the patched function and by our hook."""
    from sglang.srt.managers.embed_types import PositionalEmbeds

    from sglang_ascend.plugin.requests.checks import refuse_unservable_request

    class Passed(Exception):
        """Raised by what comes after the check."""

    def go_on(*arguments: Any) -> None:
        raise Passed

    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    theirs = patched(
        "0011",
        "_validate_one_request",
        get_exec=lambda: SimpleNamespace(features=features),
        math=math,
        re=re,
        PositionalEmbeds=PositionalEmbeds,
    )
    manager = SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=50, hidden_size=8),
        _validate_joint_schema_request=lambda *_: None,
    )
    # Reading the context length is the first thing after the check.
    manager_class = type("Manager", (SimpleNamespace,), {"context_len": property(go_on)})
    request = SimpleNamespace(**fields)
    with pytest.raises(ValueError if refused else Passed):
        theirs(manager_class(**vars(manager)), request, ids)
    with pytest.raises(ValueError if refused else Passed):
        refuse_unservable_request(go_on, manager, request, ids)


@pytest.mark.sglang
@pytest.mark.parametrize("ids", [[0, 49], [50], [-1, 3], [2**40], [], None])
@pytest.mark.parametrize("min_new_tokens", [0, 1])
def test_0012_refuses_what_our_hook_refuses(patched, ids, min_new_tokens):
    from sglang.srt.sampling import sampling_params

    from sglang_ascend.plugin.requests.checks import refuse_unservable_parameters

    theirs = patched("0012", "verify", **vars(sampling_params), numbers=numbers)
    params = sampling_params.SamplingParams(stop_token_ids=ids, min_new_tokens=min_new_tokens)
    refused = bool(min_new_tokens and ids and not all(0 <= token < 50 for token in ids))
    wrong = pytest.raises(ValueError, match="stop_token_ids") if refused else nullcontext()
    with wrong:
        theirs(deepcopy(params), 50)
    with wrong:
        refuse_unservable_parameters(lambda *arguments: None, params, 50)


@pytest.mark.sglang
def test_0012_leaves_out_stop_tokens_of_nobody_as_our_hook_does(patched):
    from sglang.srt.sampling import sampling_params

    from sglang_ascend.plugin.requests.checks import refuse_unservable_parameters

    theirs = patched("0012", "verify", **vars(sampling_params), numbers=numbers)
    for verify in (theirs, partial(refuse_unservable_parameters, lambda *arguments: None)):
        params = sampling_params.SamplingParams(stop_token_ids=[-1, 7, 50])
        verify(params, 50)
        assert params.stop_token_ids == {7}


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"logit_bias": {"3": 1e30, "4": -1e30}}, None),
        ({"logit_bias": {"3": float("inf")}}, "logit_bias"),
        ({"logit_bias": {"3": float("nan")}}, "logit_bias"),
        ({"logit_bias": {"3": -2e30}}, "logit_bias"),
        ({"temperature": 1e30}, None),
        ({"temperature": 1e39}, "temperature"),
        ({"repetition_penalty": 1e-6}, None),
        ({"repetition_penalty": 1e-50}, "repetition_penalty"),
        ({"top_k": 2**31 - 1}, None),
        ({"top_k": 2**31}, "top_k"),
        ({"max_new_tokens": 4.0}, "max_new_tokens"),
        ({"max_new_tokens": np.int64(4), "ignore_eos": 1}, None),
        ({"stream_interval": "3"}, "stream_interval"),
        ({"skip_special_tokens": []}, "skip_special_tokens"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
    ],
)
def test_0012_refuses_other_values_that_our_hook_refuses(patched, values, named):
    from sglang.srt.sampling import sampling_params

    from sglang_ascend.plugin.requests.checks import refuse_unservable_parameters

    theirs = patched("0012", "verify", **vars(sampling_params), numbers=numbers)
    params = sampling_params.SamplingParams(**values)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        theirs(params, 50)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        refuse_unservable_parameters(lambda *arguments: None, params, 50)


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


def test_0031_copies_rows_by_where_they_are(patched):
    called: list[Any] = []
    function = patched(
        "0031",
        "memcpy",
        memcpy_cpu=lambda *arguments: called.append(("cpu", arguments)),
        memcpy_triton=lambda *arguments: called.append(("triton", arguments)),
    )
    rows = [SimpleNamespace(is_cpu=is_cpu) for is_cpu in (True, False)]
    for dst in rows:
        function(dst, "src", 0, 1, 2, False)
    assert called == [
        (where, (dst, "src", 0, 1, 2, False))
        for where, dst in zip(("cpu", "triton"), rows, strict=True)
    ]


def test_0033_gathers_logits_of_each_part_of_the_vocabulary_beside_the_others(patched):
    """The stand-in takes what gloo takes: as many dimensions on both sides."""
    logits = torch.arange(12.0).view(3, 4)

    def gather(output: torch.Tensor, input: torch.Tensor) -> None:
        assert output.shape == (6, 2)
        output.copy_(torch.cat([input, logits[:, 2:]]))

    function = patched(
        "0033",
        "LogitsProcessor._gather_attn_tp_logits",
        torch=torch,
        attn_tp_all_gather_into_tensor=gather,
    )
    processor = SimpleNamespace(vocab_size=4, attn_tp_size=2)
    assert torch.equal(function(processor, logits[:, :2].contiguous()), logits)
