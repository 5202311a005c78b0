"""Server processes of benchmarks and tests: the package's own."""

from sglang_ascend.bench.server import (
    LAUNCH,
    START_TIMEOUT_S,
    ServerProcess,
    die_with_parent,
    free_port,
    starting_server,
)

__all__ = [
    "LAUNCH",
    "START_TIMEOUT_S",
    "ServerProcess",
    "die_with_parent",
    "free_port",
    "starting_server",
]
