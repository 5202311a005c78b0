"""The same model without and with speculation, as every comparison here needs them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from launched_server import LaunchedServer, Reply, ServerConfig

# A test may have to start its two servers, on cores that it does not have alone.
TEST_TIMEOUT_S = 1500
MODELS = ("nano-deepseek", "smollm2-mtp")
# Page size -> chunk of prefill; at page 16 every prompt is prefilled in one piece.
CHUNK_OF_PAGE = {1: 512, 16: 4096, 128: 512}
# A pool that is touched quickly at start, and batches wide enough for the sampling tests.
LIMITS = ("--max-total-tokens", "16384", "--max-running-requests", "256")


def plain_and_mtp(
    folder: Path, page_size: int = 1, dtype: str = "float32", mtp_flags: tuple[str, ...] = ()
) -> tuple[ServerConfig, ServerConfig]:
    flags = ("--chunked-prefill-size", str(CHUNK_OF_PAGE[page_size]), *LIMITS)
    return (
        ServerConfig(folder, mtp=False, dtype=dtype, page_size=page_size, flags=flags),
        ServerConfig(folder, mtp=True, dtype=dtype, page_size=page_size, flags=flags + mtp_flags),
    )


MISTAKES = ("accept_every_draft", "repeat_the_first_draw")
REJECTION_MISTAKES = ("accept_every_drawn_draft", "redraw_without_residual")


def broken_verifier(folder: Path, mistake: str, mtp_flags: tuple[str, ...] = ()) -> ServerConfig:
    """As the MTP server of `plain_and_mtp`, with one mistake."""
    return replace(
        plain_and_mtp(folder, mtp_flags=mtp_flags)[1],
        python_path=Path(__file__).parent / "broken_verifier",
        variables=(("BROKEN_VERIFIER", mistake),),
    )


def broken_verifiers(folder: Path) -> list[ServerConfig]:
    """One server for each of MISTAKES."""
    return [broken_verifier(folder, mistake) for mistake in MISTAKES]


def ask_both(
    pair: list[LaunchedServer], ask: Callable[[LaunchedServer], list[Reply]]
) -> list[list[Reply]]:
    """Both at once: each server has its core."""
    with ThreadPoolExecutor(len(pair)) as pool:
        return list(pool.map(ask, pair))


def tokens_per_step(replies: list[Reply]) -> float:
    """Acceptance length: tokens of decode by forwards of the target; prefill gives the first."""
    num_tokens = sum(len(reply.tokens) - 1 for reply in replies)
    return num_tokens / sum(reply.meta["spec_verify_ct"] for reply in replies)
