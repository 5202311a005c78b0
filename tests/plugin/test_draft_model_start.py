"""`--speculative-algorithm STANDALONE` on a CPU is our step with a model of its own before it. What
was not seen to work with one is refused at start, in one sentence that names the flag."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resolved_arguments import assert_one_sentence, resolved
from tiny_targets import write_target

from sglang_ascend.plugin.errors import StartupRefused

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

REFUSED = [
    (
        "--speculative-adaptive --speculative-adaptive-config a.json",
        "--speculative-adaptive-config is not served",
    ),
    ("--speculative-use-rejection-sampling", "--speculative-use-rejection-sampling, not tried"),
    ("--tp-size 2", "--tp-size above 1, not tried with a draft model"),
    ("--tp-size 2 --dp-size 2 --enable-dp-attention", "--tp-size above 1"),
    ("--disaggregation-mode decode", "--disaggregation-mode, not tried"),
    ("--enable-hierarchical-cache", "--enable-hierarchical-cache, not tried"),
    ("--enable-mixed-chunk", "--enable-mixed-chunk, not tried"),
    ("--load-format dummy", "--load-format dummy, not tried"),
    ("--speculative-eagle-topk 2", "--speculative-eagle-topk 2 asks for a tree"),
    ("--speculative-num-steps 16", "--speculative-num-steps must be between 1 and 15"),
    (
        "--enable-watermark",
        "--enable-watermark is not served with --speculative-algorithm STANDALONE",
    ),
    ("--attention-backend torch_native", "--attention-backend torch_native"),
]
VARIABLES = [
    ("SGLANG_ASCEND_DRAFT_P_MIN", "0.25"),
    ("SGLANG_ASCEND_LOSSY_ACCEPTANCE", "threshold:0.3"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target", "LlamaForCausalLM")
    write_target(folder / "draft", "Qwen2ForCausalLM", hidden_size=16)
    return folder


def resolve(models: Path, flags: str, algorithm: str = "STANDALONE", draft: str = "draft") -> Any:
    from sglang.srt.server_args import prepare_server_args

    command = f"--model-path {models / 'target'} --speculative-algorithm {algorithm} "
    command += f"--speculative-draft-model-path {models / draft} {flags}"
    server_args = prepare_server_args(command.split())
    server_args.resolve_once()
    return server_args


def assert_refused(models: Path, named: str, *args: str) -> None:
    with pytest.raises(StartupRefused) as refusal:
        resolve(models, *args)
    assert_one_sentence(str(refusal.value), named)


@pytest.mark.parametrize("name", ["STANDALONE", "standalone"])
def test_sglangs_name_is_served_by_our_step(models: Path, name: str) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ascend.plugin.draft_model.worker import DraftModelWorker

    server_args = resolve(models, "--speculative-num-steps 5", name)
    assert resolved(server_args, "speculative_algorithm") == "DRAFT_MODEL"
    assert resolved(server_args, "speculative_num_draft_tokens") == 6
    assert resolved(server_args, "speculative_draft_model_path") == str(models / "draft")
    algorithm = SpeculativeAlgorithm.from_string("DRAFT_MODEL")
    assert algorithm.create_worker(server_args) is DraftModelWorker


def test_the_answers_to_core_are_mtps_but_no_hidden_state_is_asked_for() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ours, mtp = map(SpeculativeAlgorithm.from_string, ("DRAFT_MODEL", "MTP"))
    asked = [n for n in vars(SpeculativeAlgorithm) if n.startswith(("is_", "supports_", "need"))]
    different = {n for n in asked if getattr(ours, n)() != getattr(mtp, n)()}
    assert different == {"is_standalone"}
    args = SimpleNamespace(speculative_num_draft_tokens=4)
    assert ours.resolve_max_speculative_num_draft_tokens(args) == 5, "K-1 more are written"


@pytest.mark.parametrize(("flags", "named"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_a_flag_that_was_not_seen_to_work_is_refused(models: Path, flags: str, named: str) -> None:
    assert_refused(models, named, flags)


@pytest.mark.parametrize(("variable", "value"), VARIABLES)
def test_so_is_a_variable(
    models: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert_refused(models, f"{variable}, not tried", "")


def test_chains_of_any_length_are_served(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ASCEND_LOOKUP_DRAFTS", "8")
    server_args = resolve(models, "--speculative-adaptive")
    assert resolved(server_args, "speculative_adaptive") is True
    assert resolved(server_args, "speculative_num_draft_tokens") == 9


def test_another_tokenizer_is_refused_before_a_weight_is_read(models: Path, tmp_path: Path) -> None:
    draft = write_target(tmp_path / "draft", "LlamaForCausalLM")
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace('"Write"', '"write"'))
    assert_refused(models, "another vocabulary than the target", "", "STANDALONE", str(draft))


def test_without_a_draft_the_flag_is_named(models: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    command = f"--model-path {models / 'target'} --speculative-algorithm STANDALONE"
    with pytest.raises(StartupRefused, match="--speculative-draft-model-path"):
        prepare_server_args(command.split()).resolve_once()


def test_a_draft_that_reads_less_than_is_served_is_refused(models: Path, tmp_path: Path) -> None:
    draft = write_target(tmp_path / "draft", "LlamaForCausalLM", max_position_embeddings=64)
    assert json.loads((draft / "config.json").read_text())["max_position_embeddings"] == 64
    assert_refused(models, "pass --context-length 64", "", "STANDALONE", str(draft))
    resolve(models, "--context-length 64", "STANDALONE", str(draft))
