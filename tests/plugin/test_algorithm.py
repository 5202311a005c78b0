"""`--speculative-algorithm MTP` alone is enough, every default can be set, nothing is dropped.

The arguments go through SGLang's own parser and resolution, as `launch_server` runs them. What MTP
cannot serve is refused there, in one sentence that names the flag, before any weight is read.
"""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import pytest

from sglang_ascend.plugin import startup_checks
from sglang_ascend.plugin.device import CUDA, NPU
from sglang_ascend.plugin.errors import StartupRefused

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

ALONE = {
    "attention_backend": "ascend",
    "device": "cpu",
    "disable_overlap_schedule": False,
    "disaggregation_decode_retraction_backup": "cpu_tensor",
    "max_running_requests": 48,
    "max_total_tokens": 65_536,
    "sampling_backend": "pytorch",
    "sleep_on_idle": True,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_num_steps": 3,
}

OVERRIDES = [
    ("--speculative-num-steps 1", {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}),
    ("--speculative-num-steps 15", {"speculative_num_steps": 15}),
    ("--speculative-num-draft-tokens 6", {"speculative_num_steps": 5}),
    ("--speculative-eagle-topk 1", {"speculative_eagle_topk": 1, "speculative_num_steps": 3}),
    ("--disable-overlap-schedule", {"disable_overlap_schedule": True}),
    ("--max-running-requests 7", {"max_running_requests": 7}),
    ("--max-total-tokens 2048", {"max_total_tokens": 2048}),
    ("--attention-backend ascend", {"attention_backend": "ascend"}),
    ("--speculative-adaptive", {"speculative_adaptive": True, "speculative_num_steps": 3}),
    ("--page-size 16", {"page_size": 16, "speculative_num_steps": 3}),
]

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


@pytest.fixture(autouse=True)
def leave_the_environment(monkeypatch):
    """Several ranks would share the cores of this process, and of every server that it starts."""
    monkeypatch.setattr("sglang_ascend.plugin.mtp.ranks.share_machine", lambda num_ranks: None)


def resolve(folder, flags: str):
    from sglang.srt.server_args import prepare_server_args

    common = ["--model-path", str(folder), "--skip-tokenizer-init"]
    server_args = prepare_server_args([*common, *flags.split()])
    server_args.resolve_once()
    return server_args


def resolved(server_args, name: str):
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, name)


def test_the_flag_alone_gets_every_default(tiny_mimo):
    server_args = resolve(tiny_mimo, "--speculative-algorithm MTP")
    expected = {**ALONE, "speculative_draft_model_path": str(tiny_mimo)}
    assert {name: resolved(server_args, name) for name in expected} == expected


def test_no_code_of_a_checkpoint_is_run(tiny_mimo, tmp_path, monkeypatch):
    """Recipes set the flag for published checkpoints, whose auto_map nobody needs."""
    folder = shutil.copytree(tiny_mimo, tmp_path / "published")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    said = []
    monkeypatch.setattr(startup_checks.logger, "info", lambda text, *_: said.append(text))
    for flags in ("", "--load-format dummy"):
        server_args = resolve(folder, f"--speculative-algorithm MTP --trust-remote-code {flags}")
        assert resolved(server_args, "trust_remote_code") is False
        assert said.pop(0).startswith("--trust-remote-code is left out")


def test_no_code_of_a_checkpoint_that_is_to_be_downloaded_is_run():
    from sglang.srt.server_args import prepare_server_args

    asked = "--model-path organisation/model --speculative-algorithm MTP --trust-remote-code"
    server_args = prepare_server_args(asked.split())
    with pytest.raises(OSError, match="offline"):  # it goes on to SGLang's download
        server_args.resolve_once()
    assert resolved(server_args, "trust_remote_code") is False


@pytest.mark.parametrize(("flags", "expected"), OVERRIDES, ids=[flags for flags, _ in OVERRIDES])
def test_a_default_gives_way_to_the_flag_of_sglang(tiny_mimo, flags, expected):
    server_args = resolve(tiny_mimo, f"--speculative-algorithm MTP {flags}")
    assert {name: resolved(server_args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "sleeps"),
    [
        ("", True),
        ("--tp-size 2 --attn-dp-size 2", False),
        ("--tp-size 2 --attn-dp-size 2 --sleep-on-idle", True),
    ],
)
def test_an_idle_server_sleeps_where_no_rank_waits_for_another(tiny_mimo, flags, sleeps):
    assert resolved(resolve(tiny_mimo, flags), "sleep_on_idle") is sleeps


def test_the_draft_path_gives_way_to_its_flag(tiny_mimo, tmp_path):
    other = tmp_path / "other"
    other.symlink_to(tiny_mimo)
    flags = f"--speculative-algorithm MTP --speculative-draft-model-path {other}"
    assert resolved(resolve(tiny_mimo, flags), "speculative_draft_model_path") == str(other)


@pytest.mark.parametrize("name", ["mtp", "Mtp"])
def test_the_name_is_case_insensitive_like_sglangs_own(tiny_mimo, name):
    assert resolved(resolve(tiny_mimo, f"--speculative-algorithm {name}"), "speculative_num_steps")


@pytest.mark.parametrize("name", ["NEXTN", "nextn", "EAGLE"])
@pytest.mark.parametrize("flags", ["", *(flags for flags, _ in OVERRIDES)])
def test_sglangs_names_on_a_cpu_are_ours(tiny_mimo, name, flags):
    """Every argument is what it is with MTP, the chosen worker's and relay's name among them."""
    ours, theirs = (
        resolve(tiny_mimo, f"--speculative-algorithm {algorithm} {flags}")
        for algorithm in ("MTP", name)
    )
    names = [field for field in vars(ours) if not field.startswith("_")]
    changed = {
        field: resolved(theirs, field)
        for field in names
        if resolved(theirs, field) != resolved(ours, field)
    }
    assert not changed
    assert resolved(theirs, "speculative_algorithm") == "MTP"


@pytest.mark.parametrize("name", ["NEXTN", "EAGLE"])
def test_a_tree_under_sglangs_names_is_refused_on_a_cpu(tiny_mimo, name):
    flags = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 8"
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, f"--speculative-algorithm {name} {flags}")
    assert_one_sentence(str(refusal.value), "--speculative-eagle-topk 2 asks for a tree")


@pytest.mark.parametrize(("flags", "named"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_mtp_cannot_serve_is_refused_in_one_sentence_that_names_the_flag(
    tiny_mimo, flags, named
):
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, f"--speculative-algorithm MTP {flags}")
    assert_one_sentence(str(refusal.value), named)


@pytest.mark.parametrize(
    ("flags", "rows"), [("", 9), ("--speculative-num-steps 10", 11)], ids=["default", "longer"]
)
def test_the_longest_chain_is_the_lookup_s_where_that_is_longer(
    tiny_mimo, monkeypatch, flags, rows
):
    monkeypatch.setenv("SGLANG_ASCEND_LOOKUP_DRAFTS", "8")
    server_args = resolve(tiny_mimo, f"--speculative-algorithm MTP {flags}")
    assert resolved(server_args, "speculative_num_draft_tokens") == rows


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
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, f"--speculative-algorithm MTP {flag}")
    assert_one_sentence(str(refusal.value), f"{next(iter(variables))} with {named}")


NUMBER, PROBABILITY = "a number between 0 and 15", "a probability between 0 and 1"
UNUSABLE = [
    *(("SGLANG_ASCEND_LOOKUP_DRAFTS", value, NUMBER) for value in ("many", "16", "-1", "²", "")),
    *(("SGLANG_ASCEND_DRAFT_P_MIN", value, PROBABILITY) for value in ("much", "1.5", "-0.1")),
    *(("SGLANG_ASCEND_DRAFT_P_MIN", value, PROBABILITY) for value in ("nan", "")),
]


@pytest.mark.parametrize(("name", "value", "meant"), UNUSABLE)
def test_a_value_that_is_none_is_refused(tiny_mimo, monkeypatch, name, value, meant):
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), meant)


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
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), "SGLANG_ASCEND_TRUST_COPY_ORDER='yes' is not usable")


@pytest.mark.usefixtures("on_npu")
def test_decode_rows_in_a_prefill_are_refused_on_an_npu(tiny_mimo):
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP --enable-mixed-chunk")
    assert_one_sentence(str(refusal.value), "--enable-mixed-chunk")


@pytest.mark.usefixtures("on_npu")
def test_adaptive_drafting_is_served_on_an_npu(tiny_mimo):
    flags = "--speculative-algorithm MTP --speculative-adaptive"
    assert resolve(tiny_mimo, flags).speculative_adaptive


@pytest.mark.usefixtures("on_npu")
def test_lookups_are_refused_on_an_npu(tiny_mimo, monkeypatch):
    monkeypatch.setenv("SGLANG_ASCEND_LOOKUP_DRAFTS", "8")
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), "SGLANG_ASCEND_LOOKUP_DRAFTS on this device")


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
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, f"--speculative-algorithm MTP --disaggregation-mode decode {flags}")
    assert_one_sentence(str(refusal.value), named)


@pytest.mark.usefixtures("on_npu")
def test_a_tiled_cache_is_refused_on_an_npu(tiny_mimo, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), "SGLANG_USE_FIA_NZ")


@pytest.mark.usefixtures("on_npu")
def test_a_model_of_sparse_attention_is_refused_on_an_npu(tiny_mimo, monkeypatch):
    """Its index_topk is what tells it: without that the same model passes."""
    from sglang_ascend.plugin.npu import latent_attention

    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=None)
    model = SimpleNamespace(hf_config=config, hf_text_config=SimpleNamespace(to_dict=dict))
    monkeypatch.setattr(latent_attention, "model_config_of", lambda server_args: model)
    resolve(tiny_mimo, "--speculative-algorithm MTP")
    config.index_topk = 2048
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), "index_topk")


def assert_one_sentence(text: str, named: str) -> None:
    assert text.startswith("sglang-ascend: ")
    assert named in text
    assert "\n" not in text
    # A full stop ends the sentence; those inside 0.5.23 or a path are followed by no space.
    assert re.findall(r"[.!?](?=\s)", text) == []


def test_a_trace_folder_is_made_before_any_process_starts(tiny_mimo, monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_ASCEND_TRACE", str(tmp_path / "a" / "b"))
    resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/folder", "  "])
def test_a_trace_folder_that_can_hold_none_is_refused(tiny_mimo, monkeypatch, folder):
    monkeypatch.setenv("SGLANG_ASCEND_TRACE", folder)
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), "SGLANG_ASCEND_TRACE=")


def test_a_trace_is_refused_where_another_worker_runs_the_step(tiny_mimo, monkeypatch):
    from sglang_ascend.plugin import startup_checks

    monkeypatch.setenv("SGLANG_ASCEND_TRACE", "/dev/null")
    monkeypatch.setattr(startup_checks, "device_profile", lambda: CUDA)
    with pytest.raises(StartupRefused) as refusal:
        resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert_one_sentence(str(refusal.value), "SGLANG_ASCEND_TRACE traces the step")


def test_without_speculation_other_backends_are_left_alone(tiny_mimo):
    """The platform names a default and overrules no flag. Core turns intel_amx into torch_native
    where there is no AMX."""
    for backend in ("torch_native", "intel_amx"):
        server_args = resolve(tiny_mimo, f"--attention-backend {backend}")
        assert resolved(server_args, "attention_backend") != "ascend"


@pytest.mark.parametrize("filled_in", ["intel_amx", "torch_native"])
def test_cores_default_for_any_cpu_is_replaced_by_ours(tiny_mimo, monkeypatch, filled_in):
    """Core fills in torch_native on arm64, as on Ascend hosts, and intel_amx elsewhere."""
    from sglang.srt.arg_groups import platform_hook

    monkeypatch.setattr(platform_hook, "is_host_cpu_arm64", lambda: filled_in == "torch_native")
    assert resolved(resolve(tiny_mimo, ""), "attention_backend") == "ascend"


def test_core_may_call_everything_that_its_own_algorithms_have():
    """CustomSpecAlgo lacks three of these; a fourth would surface as a crash while serving."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ascend.plugin.mtp.algorithm import MTPAlgorithm

    public = {
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if callable(value) and not name.startswith("_")
    }
    # Asked of its own algorithms only.
    public -= {"get_platform_worker_cls"}
    assert {name for name in public if not hasattr(MTPAlgorithm, name)} == set()


def test_the_answers_to_core_are_eagles():
    """Same radix keys and draft KV as EAGLE, so the same predicates; but a step relays no state."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    mtp, eagle = SpeculativeAlgorithm.from_string("MTP"), SpeculativeAlgorithm.EAGLE
    asked = [
        name
        for name in vars(SpeculativeAlgorithm)  # dir() of an enum hides its methods
        if name.startswith(("is_", "supports_", "has_", "need", "carries"))
    ]
    assert len(asked) > 10
    different = {
        name
        for name in asked
        if callable(getattr(mtp, name)) and getattr(mtp, name)() != getattr(eagle, name)()
    }
    assert different == {"carries_draft_hidden_states"}


def test_the_kv_reserve_holds_a_whole_step_whatever_the_host_has_not_seen_yet():
    """2K positions are written past the committed ones, of which the host may miss K+1."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    mtp = SpeculativeAlgorithm.from_string("MTP")
    for num_steps in range(1, 16):
        server_args = SimpleNamespace(speculative_num_draft_tokens=num_steps + 1)
        reserve = 2 * mtp.resolve_max_speculative_num_draft_tokens(server_args)
        written, unseen = 2 * num_steps, num_steps + 1
        assert written + unseen <= reserve <= written + unseen + 1
