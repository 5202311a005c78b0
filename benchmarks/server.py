"""Server processes of benchmarks and tests: those that `sglang-ascend verify-npu` starts."""

from sglang_ascend.verify.server import (
    LAUNCH,
    START_TIMEOUT_S,
    ServerProcess,
    die_with_parent,
    free_port,
)

__all__ = ["LAUNCH", "START_TIMEOUT_S", "ServerProcess", "die_with_parent", "free_port"]
