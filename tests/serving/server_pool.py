"""The servers that are running now, shared by all tests of a session."""

from __future__ import annotations

from pathlib import Path

from begun_servers import BegunServer
from launched_server import LaunchedServer, ServerConfig


class ServerPool:
    """Keeps the servers of the last request alive, so that two cores never hold more than a few."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._num_started = 0
        self._alive: dict[ServerConfig, LaunchedServer] = {}

    def get(self, *configs: ServerConfig) -> list[LaunchedServer]:
        """Ready servers of these configurations; the missing ones start side by side."""
        for config in set(self._alive) - set(configs):
            self._alive.pop(config).stop()
        missing = [config for config in configs if config not in self._alive]
        try:
            for config in missing:
                self._num_started += 1
                log = self._log_folder / f"server{self._num_started}.log"
                self._alive[config] = BegunServer(config, log)
            # A health check costs an idle server a second: only new ones are asked.
            for config in missing:
                self._alive[config].wait_until_ready()
            return [self._alive[config] for config in configs]
        except BaseException:
            self.stop()
            raise

    def get_flushed(self, *configs: ServerConfig) -> list[LaunchedServer]:
        """As ``get``, with empty radix caches."""
        running = self.get(*configs)
        for server in running:
            server.flush_cache()
        return running

    def stop(self) -> None:
        while self._alive:
            self._alive.popitem()[1].stop()
