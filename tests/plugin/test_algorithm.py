"""`--speculative-algorithm MTP` alone is enough, every default can be set, nothing is dropped."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from resolved_arguments import assert_refused, resolve, resolved

from sglang_ascend.plugin import startup_checks
from sglang_ascend.plugin.device import CUDA

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins", "cores_of_all")]

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


@pytest.mark.parametrize(
    ("flags", "rows"), [("", 9), ("--speculative-num-steps 10", 11)], ids=["default", "longer"]
)
def test_the_longest_chain_is_the_lookup_s_where_that_is_longer(
    tiny_mimo, monkeypatch, flags, rows
):
    monkeypatch.setenv("SGLANG_ASCEND_LOOKUP_DRAFTS", "8")
    server_args = resolve(tiny_mimo, f"--speculative-algorithm MTP {flags}")
    assert resolved(server_args, "speculative_num_draft_tokens") == rows


def test_a_trace_folder_is_made_before_any_process_starts(tiny_mimo, monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_ASCEND_TRACE", str(tmp_path / "a" / "b"))
    resolve(tiny_mimo, "--speculative-algorithm MTP")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/folder", "  "])
def test_a_trace_folder_that_can_hold_none_is_refused(tiny_mimo, monkeypatch, folder):
    monkeypatch.setenv("SGLANG_ASCEND_TRACE", folder)
    assert_refused(tiny_mimo, "--speculative-algorithm MTP", "SGLANG_ASCEND_TRACE=")


def test_a_trace_is_refused_where_another_worker_runs_the_step(tiny_mimo, monkeypatch):
    from sglang_ascend.plugin import startup_checks

    monkeypatch.setenv("SGLANG_ASCEND_TRACE", "/dev/null")
    monkeypatch.setattr(startup_checks, "device_profile", lambda: CUDA)
    assert_refused(tiny_mimo, "--speculative-algorithm MTP", "SGLANG_ASCEND_TRACE traces the step")


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
