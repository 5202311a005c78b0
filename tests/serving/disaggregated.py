"""A prefill and a decode server that share every request, and a client that sends it to both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launched_server import LaunchedServer, Reply, ServerConfig, Tokens
from server_pairs import plain_and_mtp

HOST = "127.0.0.1"


def prefill_and_decode(folder: Path, bootstrap_port: int) -> tuple[ServerConfig, ServerConfig]:
    """Otherwise as the MTP server of `plain_and_mtp`."""
    mtp = plain_and_mtp(folder)[1]
    flags = ("--disaggregation-transfer-backend", "mooncake_tcp")
    flags += ("--disaggregation-bootstrap-port", str(bootstrap_port))
    prefill, decode = (
        replace(
            mtp,
            flags=(*mtp.flags, *flags, "--disaggregation-mode", mode),
            variables=(("SGLANG_HOST_IP", HOST),),
        )
        for mode in ("prefill", "decode")
    )
    return prefill, decode


@dataclass(frozen=True)
class Disaggregated:
    """What SGLang's router does: both servers get the request, and a room to meet in."""

    prefill: LaunchedServer
    decode: LaunchedServer
    bootstrap_port: int

    def generate_each(
        self, prompts: Sequence[Tokens], sampling: dict[str, Any], concurrency: int, **fields: Any
    ) -> list[Reply]:
        """As `LaunchedServer.generate_each`; the decode server's replies."""

        def ask(prompt: Tokens) -> Reply:
            meeting = {"bootstrap_host": HOST, "bootstrap_port": self.bootstrap_port}
            request = {**fields, **meeting, "bootstrap_room": random.randrange(1, 2**63)}
            with ThreadPoolExecutor(1) as beside:
                prefilled = beside.submit(self.prefill.generate, [prompt], sampling, **request)
                reply = self.decode.generate([prompt], sampling, **request)[0]
                prefilled.result()
            return reply

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(ask, prompts))
