"""What loading the target's weights takes in resident memory, of a real server on Linux.

$LOADING_MEMORY names the file that gets [bytes that stayed, bytes at the peak], both above what the
process held before.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from sglang.srt.model_loader.loader import DefaultModelLoader

from sglang_ascend.ops.quantized import probe

RESET_PEAK = "5"  # of /proc/self/clear_refs


def resident(field: str) -> int:
    """Bytes: VmRSS, or its highest value so far, VmHWM."""
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def install() -> None:
    original = DefaultModelLoader.load_weights_and_postprocess

    def measured(*args: Any, **kwargs: Any) -> Any:
        path = Path(os.environ["LOADING_MEMORY"])
        probe.verdicts()  # Numba and what it compiles are no weights
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        before = resident("VmRSS")
        result = original(*args, **kwargs)
        if not path.exists():  # the MTP layer is loaded second
            above = [resident(field) - before for field in ("VmRSS", "VmHWM")]
            path.write_text(json.dumps(above))
        return result

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(measured)
