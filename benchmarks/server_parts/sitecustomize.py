"""Python runs this at start when the folder is on PYTHONPATH: benchmark parts for a real server.

$BENCHMARK_PARTS lists modules of this folder; each one's ``install()`` runs in every process of the
server, right after the plugin has registered itself.
"""

import importlib
import os

from sglang_ascend.plugin import entry

register = entry._register


def register_with_parts() -> None:
    register()
    for name in os.environ["BENCHMARK_PARTS"].split(","):
        importlib.import_module(name).install()


entry._register = register_with_parts
