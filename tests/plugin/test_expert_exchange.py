"""`--moe-a2a-backend deepep` on an NPU: accepted as far as tests/npu_emulation serves it, refused
beyond in one sentence, and a step is made up to rows that the ranks of a request share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from resolved_arguments import assert_refused, resolve
from serving.quantized_checkpoints import write_quantized

from sglang_ascend.models.catalog import model_path
from sglang_ascend.plugin.device import NPU

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]
FLAGS = "--speculative-algorithm MTP --tp-size 2 --moe-a2a-backend deepep"
DP_ATTENTION = "--speculative-algorithm MTP --tp-size 2 --dp-size 2 --enable-dp-attention"
BUFFERS = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"


@pytest.fixture(autouse=True)
def on_npu(monkeypatch):
    for module in ("mtp.refusals", "mtp.adaptive.refusals", "npu.expert_exchange"):
        name = f"sglang_ascend.plugin.{module}.device_profile"
        monkeypatch.setattr(name, lambda: NPU)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--deepep-mode low_latency", "--deepep-mode low_latency"),
        ("--deepep-mode normal", "--deepep-mode normal"),
        ("--speculative-adaptive", "--speculative-adaptive"),
        ("--deepep-dispatcher-output-dtype int8", "--deepep-dispatcher-output-dtype"),
        ("--speculative-moe-a2a-backend none", "--speculative-moe-a2a-backend"),
        ("--dp-size 2", "--dp-size"),
        ("--moe-dense-tp-size 1", "--moe-dense-tp-size"),
        ("--disaggregation-mode decode", "--disaggregation-mode"),
        ("--enable-two-batch-overlap", "--enable-two-batch-overlap"),
        ("--ep-num-redundant-experts 2", "--ep-num-redundant-experts"),
        ("--speculative-use-rejection-sampling", "--speculative-use-rejection-sampling"),
    ],
)
def test_what_was_not_seen_beside_it_is_refused(flags, named):
    assert_refused(model_path("nano-deepseek"), f"{FLAGS} {flags}", f"deepep with {named}")


def test_data_parallel_attention_is_refused_beside_it():
    assert_refused(
        model_path("nano-deepseek"),
        f"{FLAGS} --dp-size 2 --enable-dp-attention",
        "--attn-dp-size above 1",
    )


@pytest.mark.parametrize("flags", [FLAGS, DP_ATTENTION])
def test_quantized_weights_are_served_by_sglang_s_own_methods_only(tmp_path, flags):
    int8 = write_quantized(model_path("nano-deepseek"), tmp_path / "int8", "W8A8_DYNAMIC")
    resolve(int8, f"{flags} --quantization modelslim")
    assert_refused(int8, flags, "add --quantization modelslim")


@pytest.mark.parametrize("backend", ["mooncake", "ascend_fuseep"])
def test_other_exchanges_are_refused(backend):
    flags = FLAGS.replace("deepep", backend)
    assert_refused(model_path("nano-deepseek"), flags, f"--moe-a2a-backend {backend}")


@pytest.mark.parametrize(("held", "needed"), [(11, 12), (1, 12)])
def test_buffers_that_hold_no_verification_are_refused(monkeypatch, held, needed):
    """Four rows of each of five requests, and of one that makes them even, on two ranks."""
    monkeypatch.setenv(BUFFERS, str(held))
    assert_refused(
        model_path("nano-deepseek"),
        f"{FLAGS} --max-running-requests 5",
        f"{BUFFERS} is {held}",
        f"at least {needed}",
    )


def test_buffers_that_just_hold_it_are_accepted(monkeypatch):
    from sglang_ascend.plugin.npu.expert_exchange import refuse_small_buffers

    monkeypatch.setenv(BUFFERS, "12")
    refuse_small_buffers(SimpleNamespace(max_running_requests=5, tp_size=2), num_draft_tokens=4)


@pytest.mark.parametrize(("num_requests", "size"), [(1, 2), (2, 2), (3, 4)])
def test_a_step_has_rows_that_the_ranks_of_a_request_can_share(monkeypatch, num_requests, size):
    from sglang_ascend.plugin.mtp import forwards

    parallel = SimpleNamespace(attn_dp_size=1, attn_tp_size=2)
    monkeypatch.setattr(forwards, "get_parallel", lambda: parallel)
    monkeypatch.setattr(forwards, "require_gathered_buffer", lambda: True)
    batch = SimpleNamespace(reqs=[None] * num_requests, global_num_tokens=[num_requests])
    assert forwards.common_batch_size(batch) == size
