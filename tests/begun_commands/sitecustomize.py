"""Python runs this at start when the folder is on PYTHONPATH: the servers that a command starts are
begun by the templates whose sockets are in the environment.
"""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import begun  # noqa: E402

from sglang_ascend.bench.server import LAUNCH, ServerProcess  # noqa: E402

as_ever = ServerProcess._begun


def begun_server(self: ServerProcess, address: list[str]) -> Any:
    command = [*self._command, *address]
    if tuple(command[: len(LAUNCH)]) != LAUNCH:
        return as_ever(self, address)
    with self.log_path.open("wb") as log, open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), log.fileno(), log.fileno())
        has_sglang = begun.may_have_sglang(self._environment)
        socket = os.environ[begun.SERVERS if has_sglang else begun.TEMPLATE]
        return begun.begin(socket, command[len(LAUNCH) - 1 :], self._environment, streams)


ServerProcess._begun = begun_server
# The server's path is the template's again, but for what the command adds.
paths = os.environ["PYTHONPATH"].split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != str(HERE))
