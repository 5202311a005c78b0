"""Prints what MTP generates: `ours`, or `bare` without any hook or workaround of this package.

Run by test_patched_sglang.py. `bare` needs an SGLang with every patch of patches/ applied. The
processes that the engine spawns run this file up to the last lines, so they are bare too.
"""

import json
import sys

import sglang
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from sglang_ascend.plugin.attention import backend as attention_backend
from sglang_ascend.plugin.cpu import platform
from sglang_ascend.plugin.hooks import registration as hooks
from sglang_ascend.plugin.mtp import algorithm as mtp_algorithm
from sglang_ascend.plugin.mtp import draft_worker
from sglang_ascend.plugin.mtp import worker as mtp_worker

MODEL, KIND = sys.argv[1:3]
PROMPTS = [[5, 6, 7, 8], [9, 3], list(range(1, 40))]


def without_workarounds() -> None:
    hooks.COMMON_HOOKS = hooks.CPU_HOOKS = hooks.QUANTIZATION_HOOKS = ()
    mtp_worker.prepare_target = lambda target_worker, draft_runner: None
    mtp_worker.RequestSeeds.give = lambda seeds, batch: None
    draft_worker.share_embedding_and_head = lambda model, *ends: model.set_embed_and_head(*ends)
    attention_backend._always_absorb_mla = lambda: None
    for name in ("get_device", "get_kv_pool_cls", "post_load_model"):
        delattr(platform.EmulationPlatform, name)
    del mtp_algorithm.MTPAlgorithm.need_topk
    mtp_worker.MTPWorker._init_as_eagle = EAGLEWorkerV2.__init__


def no_defaults(self: object, server_args: object) -> None:
    """In place of the platform's: core must find the attention backend by itself."""


if KIND == "bare":
    without_workarounds()
    platform.EmulationPlatform.apply_server_args_defaults = no_defaults

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=MODEL,
        speculative_algorithm="MTP",
        skip_tokenizer_init=True,
        dtype="float32",
        max_total_tokens=4096,
        max_running_requests=4,
        log_level="error",
    )
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=sampling)
    print(json.dumps([output["output_ids"] for output in outputs]))
    engine.shutdown()
