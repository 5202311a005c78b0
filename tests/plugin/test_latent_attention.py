"""What of SGLang's fused prolog of latent attention, and of its tiled cache, MTP's step serves on
an NPU is settled at start."""

from __future__ import annotations

import json
import shutil

import pytest
from resolved_arguments import assert_one_sentence

from sglang_ascend.models.catalog import model_path
from sglang_ascend.plugin.device import NPU
from sglang_ascend.plugin.errors import StartupRefused

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

PROLOG, TILED_CACHE = "SGLANG_NPU_USE_MLAPO", "SGLANG_USE_FIA_NZ"
AS_WIDE_AS_KEYS = {"v_head_dim": 48}  # SGLang's own prefill takes such values
UNSCALED = {"rope_scaling": None}


@pytest.fixture
def resolve(tmp_path, monkeypatch):
    """MTP's start on an NPU of nano-deepseek, with another config.json and no weights."""
    from sglang.srt.server_args import prepare_server_args

    for module in ("mtp.refusals", "mtp.adaptive.refusals", "mtp.disaggregation"):
        monkeypatch.setattr(f"sglang_ascend.plugin.{module}.device_profile", lambda: NPU)

    def resolve(model: str = "nano-deepseek", *flags: str, **changed: object) -> None:
        folder = shutil.copytree(model_path(model), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))
        common = ("--skip-tokenizer-init", "--load-format", "dummy")
        mtp = ("--speculative-algorithm", "MTP", "--model-path", str(folder))
        prepare_server_args([*mtp, *common, *flags]).resolve_once()

    return resolve


@pytest.mark.parametrize("changed", [{}, UNSCALED, AS_WIDE_AS_KEYS])
def test_the_prolog_is_served_where_it_and_the_prefill_write_alike(resolve, monkeypatch, changed):
    """nano-deepseek's values are narrower than its keys: the prolog writes its prompts too."""
    monkeypatch.setenv(PROLOG, "1")
    resolve(**changed)


def test_a_model_of_keys_by_head_has_no_prolog(resolve, monkeypatch):
    monkeypatch.setenv(PROLOG, "1")
    resolve("smollm2-mtp")


@pytest.mark.parametrize(
    ("flags", "changed", "named"),
    [
        ((), UNSCALED | AS_WIDE_AS_KEYS, "rope_scaling"),
        ((), {"q_lora_rank": None}, "q_lora_rank"),
        (("--quantization", "modelslim"), {}, "--quantization modelslim"),
    ],
)
def test_where_it_is_not_the_start_says_what_to_unset(resolve, monkeypatch, flags, changed, named):
    monkeypatch.setenv(PROLOG, "1")
    with pytest.raises(StartupRefused) as refusal:
        resolve("nano-deepseek", *flags, **changed)
    assert_one_sentence(str(refusal.value), PROLOG, named, "unset it")


def test_and_without_it_the_same_model_starts(resolve):
    resolve(**UNSCALED, **AS_WIDE_AS_KEYS)


@pytest.mark.parametrize("prolog", ["0", "1"])
def test_a_tiled_cache_is_refused_with_the_prolog_and_without(resolve, monkeypatch, prolog):
    monkeypatch.setenv(TILED_CACHE, "1")
    monkeypatch.setenv(PROLOG, prolog)
    with pytest.raises(StartupRefused) as refusal:
        resolve()
    assert_one_sentence(str(refusal.value), TILED_CACHE, "unset it", f"{PROLOG} may stay")
