"""What MTP cannot serve is refused in one sentence that names the flag, before a weight is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from resolved_arguments import assert_refused, resolve

from sglang_ascend.plugin.device import NPU

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins", "cores_of_all")]

# Flags beside --speculative-algorithm MTP, and what the refusal must name.
REFUSED = [
    (
        "--disaggregation-mode decode --speculative-use-rejection-sampling",
        "--speculative-use-rejection-sampling with --disaggregation-mode",
    ),
    ("--speculative-num-steps 0", "--speculative-num-steps"),
    ("--speculative-num-steps -1", "--speculative-num-steps"),
    ("--speculative-num-steps 16", "--speculative-num-steps"),
    ("--speculative-num-draft-tokens 1", "--speculative-num-draft-tokens"),
    ("--speculative-num-draft-tokens 17", "--speculative-num-draft-tokens"),
    ("--speculative-eagle-topk 2", "--speculative-eagle-topk"),
    ("--speculative-eagle-topk 0", "--speculative-eagle-topk"),
    (
        "--speculative-num-steps 3 --speculative-num-draft-tokens 3",
        "--speculative-num-draft-tokens",
    ),
    ("--pp-size 2", "--pp-size"),
    ("--page-size 0", "--page-size below 1"),
    ("--page-size -1", "--page-size below 1"),
    ("--tp-size 2 --dp-size 2 --enable-dp-attention", "--enable-dp-attention"),
    ("--tp-size 2 --attn-dp-size 2", "--attn-dp-size"),
    ("--enable-multi-layer-eagle", "--enable-multi-layer-eagle"),
    (
        "--speculative-adaptive --speculative-adaptive-config a.json",
        "--speculative-adaptive-config",
    ),
    (
        "--speculative-adaptive --enable-hierarchical-cache",
        "--speculative-adaptive with --enable-hierarchical-cache",
    ),
    (
        "--speculative-adaptive --disaggregation-mode decode",
        "--speculative-adaptive with --disaggregation-mode",
    ),
    ("--tp-size 2 --ep-size 2", "--ep-size above 1"),
    ("--enable-hierarchical-cache", "--enable-hierarchical-cache on a CPU"),
    ("--speculative-token-map map.pt", "--speculative-token-map"),
    ("--speculative-accept-threshold-single 0.5", "--speculative-accept-threshold-single"),
    ("--speculative-accept-threshold-acc 0.5", "--speculative-accept-threshold-acc"),
    ("--attention-backend torch_native", "--attention-backend"),
    ("--attention-backend intel_amx", "--attention-backend"),
    ("--prefill-attention-backend torch_native", "--prefill-attention-backend"),
    ("--decode-attention-backend torch_native", "--decode-attention-backend"),
    ("--speculative-draft-attention-backend triton", "--speculative-draft-attention-backend"),
    ("--moe-a2a-backend deepep", "--moe-a2a-backend deepep"),
    ("--speculative-draft-window-size 64", "--speculative-draft-window-size"),
    ("--enable-return-routed-experts", "--enable-return-routed-experts"),
    ("--enable-return-indexer-topk", "--enable-return-indexer-topk"),
    ("--is-embedding", "--is-embedding"),
    ("--enable-lora --max-lora-rank 8 --lora-target-modules all", "--enable-lora"),
    ("--lora-paths adapter=./adapter", "--lora-paths"),
    (
        "--enable-custom-logit-processor --enable-mixed-chunk",
        "--enable-custom-logit-processor with --enable-mixed-chunk",
    ),
    (
        "--enable-custom-logit-processor --disaggregation-mode decode",
        "--enable-custom-logit-processor with --disaggregation-mode",
    ),
    ("--enable-watermark", "--enable-watermark"),
    ("--grammar-backend outlines", "--grammar-backend outlines"),
    ("--enable-streaming-session", "--enable-streaming-session"),
    ("--enable-pdmux --disable-overlap-schedule --chunked-prefill-size -1", "--enable-pdmux"),
    ("--tp-size 2", "--tp-size"),
    (
        "--disaggregation-mode decode --disaggregation-transfer-backend nixl",
        "--disaggregation-transfer-backend",
    ),
    (
        "--disaggregation-mode decode --disaggregation-transfer-backend ascend",
        "--disaggregation-transfer-backend ascend",
    ),
    (
        "--disaggregation-mode decode --disaggregation-decode-retraction-backup host_pool",
        "--disaggregation-decode-retraction-backup host_pool",
    ),
    (
        "--disaggregation-mode prefill --disaggregation-enable-kv-checksum",
        "--disaggregation-enable-kv-checksum",
    ),
]


@pytest.mark.parametrize(("flags", "named"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_mtp_cannot_serve_is_refused_in_one_sentence_that_names_the_flag(
    tiny_mimo, flags, named
):
    assert_refused(tiny_mimo, f"--speculative-algorithm MTP {flags}", named)


@pytest.mark.parametrize("name", ["NEXTN", "EAGLE"])
def test_a_tree_under_sglangs_names_is_refused_on_a_cpu(tiny_mimo, name):
    flags = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 8"
    assert_refused(
        tiny_mimo,
        f"--speculative-algorithm {name} {flags}",
        "--speculative-eagle-topk 2 asks for a tree",
    )


LOOKUPS = {"SGLANG_ASCEND_LOOKUP_DRAFTS": "8"}
ENDED_CHAINS = {"SGLANG_ASCEND_DRAFT_P_MIN": "0.25"}
LOSSY = {"SGLANG_ASCEND_LOSSY_ACCEPTANCE": "threshold:0.3"}
RELAXED = {"SGLANG_ASCEND_LOSSY_ACCEPTANCE": "relaxed:2,0.3"}


@pytest.mark.parametrize(
    ("variables", "flag", "named"),
    [
        (LOOKUPS, "--enable-hierarchical-cache", "--enable-hierarchical-cache"),
        (LOOKUPS, "--disaggregation-mode decode", "--disaggregation-mode"),
        (ENDED_CHAINS, "--disaggregation-mode decode", "--disaggregation-mode"),
        (ENDED_CHAINS, "--speculative-adaptive", "--speculative-adaptive"),
        (ENDED_CHAINS | LOSSY, "", "SGLANG_ASCEND_LOSSY_ACCEPTANCE"),
        (RELAXED, "--skip-tokenizer-init", "--skip-tokenizer-init"),
    ],
)
def test_what_a_variable_cannot_serve_is_refused(tiny_mimo, monkeypatch, variables, flag, named):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_refused(
        tiny_mimo, f"--speculative-algorithm MTP {flag}", f"{next(iter(variables))} with {named}"
    )


NUMBER, PROBABILITY = "a number between 0 and 15", "a probability between 0 and 1"
UNUSABLE = [
    *(("SGLANG_ASCEND_LOOKUP_DRAFTS", value, NUMBER) for value in ("many", "16", "-1", "²", "")),
    *(("SGLANG_ASCEND_DRAFT_P_MIN", value, PROBABILITY) for value in ("much", "1.5", "-0.1")),
    *(("SGLANG_ASCEND_DRAFT_P_MIN", value, PROBABILITY) for value in ("nan", "")),
]


@pytest.mark.parametrize(("name", "value", "meant"), UNUSABLE)
def test_a_value_that_is_none_is_refused(tiny_mimo, monkeypatch, name, value, meant):
    monkeypatch.setenv(name, value)
    assert_refused(tiny_mimo, "--speculative-algorithm MTP", meant)


@pytest.fixture
def on_npu(monkeypatch):
    for module in ("refusals", "adaptive.refusals", "disaggregation"):
        name = f"sglang_ascend.plugin.mtp.{module}.device_profile"
        monkeypatch.setattr(name, lambda: NPU)


@pytest.mark.usefixtures("on_npu")
def test_a_value_that_an_npu_would_read_in_its_first_step_is_refused_at_start(
    tiny_mimo, monkeypatch
):
    monkeypatch.setenv("SGLANG_ASCEND_TRUST_COPY_ORDER", "yes")
    assert_refused(
        tiny_mimo,
        "--speculative-algorithm MTP",
        "SGLANG_ASCEND_TRUST_COPY_ORDER='yes' is not usable",
    )


@pytest.mark.usefixtures("on_npu")
def test_decode_rows_in_a_prefill_are_refused_on_an_npu(tiny_mimo):
    assert_refused(
        tiny_mimo, "--speculative-algorithm MTP --enable-mixed-chunk", "--enable-mixed-chunk"
    )


@pytest.mark.usefixtures("on_npu")
def test_adaptive_drafting_is_served_on_an_npu(tiny_mimo):
    flags = "--speculative-algorithm MTP --speculative-adaptive"
    assert resolve(tiny_mimo, flags).speculative_adaptive


@pytest.mark.usefixtures("on_npu")
def test_lookups_are_refused_on_an_npu(tiny_mimo, monkeypatch):
    monkeypatch.setenv("SGLANG_ASCEND_LOOKUP_DRAFTS", "8")
    assert_refused(
        tiny_mimo, "--speculative-algorithm MTP", "SGLANG_ASCEND_LOOKUP_DRAFTS on this device"
    )


@pytest.mark.usefixtures("on_npu")
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--disaggregation-transfer-backend mooncake", "--disaggregation-transfer-backend"),
        (
            "--disaggregation-transfer-backend ascend --speculative-use-rejection-sampling",
            "--speculative-use-rejection-sampling with --disaggregation-mode",
        ),
        (
            "--disaggregation-transfer-backend ascend "
            "--disaggregation-decode-retraction-backup host_pool",
            "--disaggregation-decode-retraction-backup host_pool",
        ),
        ("--disaggregation-transfer-backend ascend", "memfabric"),
    ],
)
def test_a_decode_server_on_an_npu_is_refused_what_is_not_served_there(tiny_mimo, flags, named):
    assert_refused(
        tiny_mimo, f"--speculative-algorithm MTP --disaggregation-mode decode {flags}", named
    )


@pytest.mark.usefixtures("on_npu")
def test_a_tiled_cache_is_refused_on_an_npu(tiny_mimo, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    assert_refused(tiny_mimo, "--speculative-algorithm MTP", "SGLANG_USE_FIA_NZ")


@pytest.mark.usefixtures("on_npu")
def test_a_model_of_sparse_attention_is_refused_on_an_npu(tiny_mimo, monkeypatch):
    """Its index_topk is what tells it: without that the same model passes."""
    from sglang_ascend.plugin.npu import latent_attention

    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=None)
    model = SimpleNamespace(hf_config=config, hf_text_config=SimpleNamespace(to_dict=dict))
    monkeypatch.setattr(latent_attention, "model_config_of", lambda server_args: model)
    resolve(tiny_mimo, "--speculative-algorithm MTP")
    config.index_topk = 2048
    assert_refused(tiny_mimo, "--speculative-algorithm MTP", "index_topk")
