"""The servers of the pool, begun as copies of a process that has imported packages."""

from __future__ import annotations

import os
from typing import Any

from begun import may_have_sglang, server_template, template
from launched_server import LaunchedServer

from benchmarks.server import LAUNCH


class BegunServer(LaunchedServer):
    """A server that begins so where it would not know."""

    def _begun(self, address: list[str]) -> Any:
        if self.config.program != LAUNCH:
            return super()._begun(address)
        command = [LAUNCH[-1], *self.config.arguments(), *address]
        with self.log_path.open("wb") as log, open(os.devnull, "rb") as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            begun = server_template() if may_have_sglang(self._environment) else template()
            return begun.begin(command, self._environment, *streams)
