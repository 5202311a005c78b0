"""What every test gets: no network hubs, few threads, and none of the caller's SGLang switches."""

import os

# Before anything imports torch or transformers, and inherited by the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
for switch in ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
    os.environ.pop(switch, None)
