"""Flags through SGLang's own parser and resolution, as ``launch_server`` runs them."""

from __future__ import annotations

import re

import pytest

from sglang_ascend.plugin.errors import StartupRefused


def resolve(folder, flags: str):
    from sglang.srt.server_args import prepare_server_args

    common = ["--model-path", str(folder), "--skip-tokenizer-init"]
    server_args = prepare_server_args([*common, *flags.split()])
    server_args.resolve_once()
    return server_args


def resolved(server_args, name: str):
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, name)


def assert_refused(folder, flags: str, *named: str) -> None:
    with pytest.raises(StartupRefused) as refusal:
        resolve(folder, flags)
    assert_one_sentence(str(refusal.value), *named)


def assert_one_sentence(text: str, *named: str) -> None:
    """With all that the reader needs to know."""
    assert text.startswith("sglang-ascend: ")
    assert [name for name in named if name not in text] == []
    assert "\n" not in text
    # A full stop ends the sentence; those inside 0.5.23 or a path are followed by no space.
    assert re.findall(r"[.!?](?=\s)", text) == []
