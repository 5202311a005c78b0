"""The application of each HTTP process of ``--tokenizer-worker-num``, where SGLang loads no plugin:
it knew no MTP there, and judged requests without our hooks."""

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]
