"""Runs SGLang's own argument handling on many command lines, for its import takes seconds.

Argument: a file of {name: [flag, ...]}; stdout's last line: {name: [outcome, message]}. Up to here,
and no further, `python -m sglang.launch_server` does the same before it starts anything.
"""

import json
import sys
from pathlib import Path

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args


def outcome(flags: list[str]) -> tuple[str, str]:
    try:
        prepare_server_args(flags).resolve_once()
    except SystemExit as refusal:
        return "refused", str(refusal.code)
    except Exception as error:
        return type(error).__name__, str(error)
    return "accepted", ""


if __name__ == "__main__":
    load_plugins()
    command_lines = json.loads(Path(sys.argv[1]).read_text())
    outcomes = {name: outcome(flags) for name, flags in command_lines.items()}
    print("\n" + json.dumps(outcomes))
