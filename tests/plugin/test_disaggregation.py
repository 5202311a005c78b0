"""A request's bonus and first draft cross SGLang's own transfer rows, whatever K either side has.

The rows are core's, filled and read by core's own functions; only the copy between two servers is
left out. tests/serving/test_processes.py has the servers.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ascend.plugin.device import CPU, NPU

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

BONUS, DRAFTS = torch.tensor([11, 12, 13]), torch.tensor([21, 22, 23])


def metadata_buffers():
    from sglang.srt.disaggregation.utils import MetadataBuffers

    from sglang_ascend.plugin.mtp.disaggregation import EMPTY_HIDDEN_STATE

    return MetadataBuffers(
        3,
        hidden_size=EMPTY_HIDDEN_STATE,
        hidden_states_dtype=torch.float32,
        max_sampling_mask_tokens=1,
    )


def prefilled(num_steps: int, filled: bool = True) -> list[SimpleNamespace]:
    """The requests as a prefill server's scheduler leaves them."""
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    from sglang_ascend.plugin.mtp.disaggregation import fill_transfer
    from sglang_ascend.speculative.lengths import lengthened

    chain = lengthened(torch.stack([BONUS, DRAFTS], dim=1), num_steps + 1)
    draft_input = EagleDraftInput(topk_p=torch.ones(3, 1), topk_index=chain, bonus_tokens=BONUS)
    if filled:
        fill_transfer(draft_input)
    return [request(row, draft_input) for row in range(3)]


def request(row: int, draft_input) -> SimpleNamespace:
    hidden = draft_input.hidden_states
    return SimpleNamespace(
        metadata_buffer_index=row,
        output_ids=[int(BONUS[row])],
        cached_tokens=0,
        cached_tokens_device=0,
        cached_tokens_host=0,
        cached_tokens_storage=0,
        get_mm_token_counts=lambda: (0, 0, 0),
        return_logprob=False,
        return_sampling_mask=False,
        output_topk_p=draft_input.topk_p[row],
        output_topk_index=draft_input.topk_index[row],
        hidden_states_tensor=None if hidden is None else hidden[row],
        bootstrap_room=row + 1,
    )


def received(reqs, num_steps: int, monkeypatch) -> torch.Tensor:
    """The chains that the decode server's relay holds afterwards."""
    from sglang_ascend.plugin.mtp import disaggregation
    from sglang_ascend.plugin.mtp.chain_relay import ChainRelay
    from sglang_ascend.speculative.drawn import DrawnDrafts

    spec = SimpleNamespace(speculative_num_draft_tokens=num_steps + 1)
    monkeypatch.setattr(disaggregation, "get_spec", lambda: spec)
    buffers = metadata_buffers()
    for req in reqs:
        buffers.set_buf(req)
    rows = [
        SimpleNamespace(
            output_topk_index=buffers.output_topk_index[req.metadata_buffer_index],
            output_ids=req.output_ids,
        )
        for req in reqs
    ]
    relay: Any = object.__new__(ChainRelay)
    relay.candidates = torch.zeros(6, num_steps + 1, dtype=torch.int64)
    relay.drawn = DrawnDrafts(6, num_steps, "cpu")
    relay.publish = lambda indices, seq_lens: None
    batch = SimpleNamespace(
        reqs=rows,
        device="cpu",
        enable_overlap=True,
        req_pool_indices=torch.tensor([4, 1, 2]),
        seq_lens=torch.tensor([7, 8, 9]),
    )
    disaggregation.received_draft_input(batch, BONUS, relay)
    return relay.candidates[batch.req_pool_indices]


@pytest.mark.parametrize(("sent", "used"), [(3, 3), (1, 1), (15, 15), (1, 3), (5, 2)])
def test_the_decode_server_starts_from_the_bonus_and_the_first_draft(sent, used, monkeypatch):
    chains = received(prefilled(sent), used, monkeypatch)
    expected = [
        [bonus] + [draft] * used
        for bonus, draft in zip(BONUS.tolist(), DRAFTS.tolist(), strict=True)
    ]
    assert chains.tolist() == expected


def test_behind_a_retraction_a_chain_repeats_its_last_token(monkeypatch):
    reqs = prefilled(3)
    reqs[1].output_ids = [5, 6, int(BONUS[1])]  # decoded since the draft was sent
    chains = received(reqs, 3, monkeypatch)
    assert chains.tolist() == [[11, 21, 21, 21], [12, 12, 12, 12], [13, 23, 23, 23]]


def test_what_leaves_for_the_host_and_returns_is_both_caches():
    from sglang_ascend.plugin.mtp.disaggregation import carry_draft_cache

    def pool(rows: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(
            get_cpu_copy=lambda indices, **_: rows[indices].clone(),
            load_cpu_copy=lambda copy, indices, **_: rows.index_copy_(0, indices, copy),
        )

    target, draft = torch.arange(8.0), 10 * torch.arange(8.0)
    allocator = pool(target)
    carry_draft_cache(allocator, pool(draft))
    copies = allocator.get_cpu_copy(torch.tensor([2, 5]), mamba_indices=None, req_pool_index=0)
    target.zero_(), draft.zero_()
    allocator.load_cpu_copy(copies, torch.tensor([1, 7]), mamba_indices=None, req_pool_index=3)
    assert target.tolist() == [0, 2, 0, 0, 0, 0, 0, 5]
    assert draft.tolist() == [0, 20, 0, 0, 0, 0, 0, 50]


def test_without_a_hidden_state_core_would_send_no_draft(monkeypatch):
    """The control: what `fill_transfer` is for."""
    chains = received(prefilled(3, filled=False), 3, monkeypatch)
    assert chains[:, 0].tolist() == BONUS.tolist()
    assert chains[:, 1:].abs().sum() == 0


ENGINES = {CPU: ("mooncake.engine", "libibverbs1"), NPU: ("memfabric_hybrid", "memfabric-hybrid")}


@pytest.mark.parametrize("device", ENGINES, ids=lambda device: device.device_type)
@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_a_missing_engine_is_named_before_anything_starts(mode, device, monkeypatch):
    from sglang_ascend.plugin.errors import StartupRefused
    from sglang_ascend.plugin.mtp import disaggregation

    def missing(name: str) -> None:
        assert name == module
        raise ImportError("its library: cannot open shared object file")

    module, package = ENGINES[device]
    server_args = SimpleNamespace(disaggregation_mode=mode)
    monkeypatch.setenv(disaggregation.STORE_URL, "tcp://127.0.0.1:24667")
    monkeypatch.setattr(disaggregation, "device_profile", lambda: device)
    monkeypatch.setattr(disaggregation, "import_module", missing)
    refusal = pytest.raises(StartupRefused, match=package) if mode != "null" else nullcontext()
    with refusal:
        disaggregation.refuse_missing_engine(server_args)
    monkeypatch.setattr(disaggregation, "import_module", lambda name: None)
    disaggregation.refuse_missing_engine(server_args)


@pytest.mark.parametrize(
    ("mode", "given", "kept"),
    [
        ("decode", None, "cpu_tensor"),
        ("decode", "host_pool", "host_pool"),
        ("prefill", None, None),
        ("null", None, None),
    ],
)
def test_a_decode_server_keeps_retracted_requests_in_tensors_unless_told_otherwise(
    mode, given, kept
):
    from sglang_ascend.plugin.mtp.disaggregation import keep_retracted_on_host

    server_args = SimpleNamespace(
        disaggregation_mode=mode, disaggregation_decode_retraction_backup=given
    )
    keep_retracted_on_host(server_args)
    assert server_args.disaggregation_decode_retraction_backup == kept


def test_memfabric_s_store_is_asked_for(monkeypatch):
    from sglang_ascend.plugin.errors import StartupRefused
    from sglang_ascend.plugin.mtp import disaggregation

    monkeypatch.delenv(disaggregation.STORE_URL, raising=False)
    monkeypatch.setattr(disaggregation, "device_profile", lambda: NPU)
    monkeypatch.setattr(disaggregation, "import_module", lambda name: None)
    with pytest.raises(StartupRefused, match="ASCEND_MF_STORE_URL"):
        disaggregation.refuse_missing_engine(SimpleNamespace(disaggregation_mode="decode"))
