"""A model that SGLang drafts for by an MTP layer is served here, or refused by what it needs."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import MagicMock

import pytest

from sglang_ascend.checkpoint.families import FAMILIES
from sglang_ascend.checkpoint.unserved import NEEDED

pytestmark = pytest.mark.sglang


def draft_architecture(architecture: str) -> str:
    """What SGLang makes of a checkpoint of `architecture` that is given as a draft."""
    from sglang.srt.configs.model_config import ModelConfig

    config = MagicMock(architectures=[architecture])
    config.__deepcopy__ = lambda memo: config
    model = MagicMock(is_draft_model=True, speculative_algorithm="MTP", hf_config=config)
    with suppress(RecursionError):  # of the mock, which is copied: behind the renaming
        ModelConfig._config_draft_model(model)
    return model.hf_config.architectures[0]


def test_every_model_with_an_mtp_class_is_served_or_refused_by_what_it_needs() -> None:
    from sglang.srt.models.registry import ModelRegistry

    served = {family.architecture: family.draft_architecture for family in FAMILIES}
    refused = [name for names in NEEDED.values() for name in names]
    assert len(refused) == len(set(refused)) and not served.keys() & set(refused)
    drafted = {name: draft_architecture(name) for name in ModelRegistry.get_supported_archs()}
    drafted = {name: draft for name, draft in drafted.items() if draft != name}
    assert len(drafted) > 30 and drafted.keys() - served.keys() <= set(refused)
    assert {name: drafted[name] for name in served} == served
