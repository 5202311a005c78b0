"""python -m npu_emulation.serve --requests FILE [--json FILE] SGLANG-FLAGS...

Serves FILE's requests with SGLang on the emulated NPU and prints one JSON object: tokens, counts of
every iteration, and the class names of what served. FILE holds waves, each a list of requests
{"input_ids": [...], "sampling_params": {...}}; a wave starts when the last one has finished.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch_npu  # noqa: F401  (registers the device)

from npu_emulation import stand_ins

stand_ins.install()

from npu_emulation.report import Request  # noqa: E402
from npu_emulation.serving import serve  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m npu_emulation.serve", description=__doc__)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="where the report goes, instead of the output")
    options, arguments = parser.parse_known_args()
    waves = [
        [Request(**request) for request in wave]
        for wave in json.loads(options.requests.read_text())
    ]
    torch.manual_seed(0)
    report = serve(arguments, waves).as_json()
    if options.json:
        options.json.write_text(report)
    else:
        print(report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the server's threads would wait for its other processes


if __name__ == "__main__":
    main()
