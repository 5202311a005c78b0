"""The launch lines of docs/ascend.md, for machines not at hand, are lines that SGLang parses."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text(encoding="utf-8")


def launch_lines(text: str) -> list[list[str]]:
    """The arguments of every launch_server in a code block."""
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    commands = [line.split("sglang.launch_server", 1) for line in lines]
    return [shlex.split(parts[1]) for parts in commands if len(parts) == 2]


def parse(arguments: list[str]) -> argparse.Namespace:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(arguments)


@pytest.mark.usefixtures("loaded_plugins")
def test_every_launch_line_is_parsed():
    lines = launch_lines(TEXT)
    assert len(lines) == 2
    for arguments in lines:
        assert parse(arguments).speculative_algorithm == "MTP"


@pytest.mark.usefixtures("loaded_plugins")
def test_a_flag_that_sglang_does_not_have_is_found():
    (arguments,) = launch_lines("```\npython -m sglang.launch_server --npu-speed 2\n```\n")
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse(arguments)
