"""What every test gets: no network hubs, one thread, and none of the caller's SGLang switches."""

import os

# Before anything imports torch or transformers, and inherited by the servers that tests start.
# One thread: two that wait for each other on a shared core take minutes for what takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
for switch in ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
    os.environ.pop(switch, None)
