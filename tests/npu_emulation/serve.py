"""python -m npu_emulation.serve --requests FILE [--json FILE] SGLANG-FLAGS...

Serves FILE's requests with SGLang on the emulated NPU and prints one JSON object: tokens, counts of
every iteration, and the class names of what served; of rank 0, under other_ranks of the others, and
under prefill of another server that prefilled: processes of the same command. FILE holds waves,
each a list of requests {"input_ids": [...], "sampling_params": {...}}; a wave starts when the last
one has finished.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch

from npu_emulation.disaggregation import Waves, serve_apart
from npu_emulation.environment import DEVICES
from npu_emulation.followers import TP_SIZE, Followers, own_rank
from npu_emulation.report import Report, Request
from npu_emulation.serving import serve
from sglang_ascend.bench.server import free_port


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m npu_emulation.serve", description=__doc__)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="where the report goes, instead of the output")
    parser.add_argument(*TP_SIZE, type=int, default=1, help="ranks, each a process and a device")
    parser.add_argument("--seed-per-rank", action="store_true", help="ranks do not draw alike")
    parser.add_argument("--disaggregated", action="store_true", help="another server prefills")
    options, arguments = parser.parse_known_args()
    waves = [
        [Request(**request) for request in wave]
        for wave in json.loads(options.requests.read_text())
    ]
    torch.manual_seed(0)
    os.environ[DEVICES] = str(options.tp_size)
    arguments += ["--tp-size", str(options.tp_size)]
    seed = own_rank() if options.seed_per_rank else None
    serve_ranks = partial(serve_with_followers, num_ranks=options.tp_size, seed=seed)
    status = 0
    try:
        if options.disaggregated:
            report = serve_apart(serve_ranks, arguments, waves).as_json()
        else:
            report = serve_ranks(arguments, waves).as_json()
        if options.json:
            options.json.write_text(report)
        else:
            print(report)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the server's threads would wait for its other processes


def serve_with_followers(
    arguments: list[str], waves: Waves, num_ranks: int, seed: int | None
) -> Report:
    if num_ranks == 1 or own_rank() != 0:
        return serve(arguments, waves, seed)
    port = ["--nccl-port", str(free_port())]
    with tempfile.TemporaryDirectory() as folder:
        followers = Followers(num_ranks, Path(folder), port)
        report = serve([*arguments, *port], waves, seed)
        report.other_ranks = followers.finish()
    return report


if __name__ == "__main__":
    main()
