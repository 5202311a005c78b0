"""Every SGLANG_ASCEND_* environment variable: name, type, default and meaning."""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

PREFIX = "SGLANG_ASCEND_"
T = TypeVar("T")


class EnvironmentVariableError(ValueError):
    """A variable has a value that does not parse; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable. `default` is the text one would export, so it goes through the same parser."""

    name: str
    parse: Callable[[str], T]  # raises ValueError whose text completes "must be ..."
    default: str
    meaning: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The parsed value, read anew at each call. Raises `EnvironmentVariableError`."""
        text = (os.environ if environ is None else environ).get(self.name, self.default)
        try:
            return self.parse(text)
        except ValueError as error:
            raise EnvironmentVariableError(
                f"{self.name}={text!r} is not usable: it must be {error}; "
                f"correct it or unset it (default {self.default!r})."
            ) from None


def path(text: str) -> Path:
    if not text.strip():
        raise ValueError("a path")
    return Path(text).expanduser()


def optional_path(text: str) -> Path | None:
    return path(text) if text else None


def switch(text: str) -> bool:
    if text not in ("", "1"):
        raise ValueError("1, or empty")
    return text == "1"


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text and text not in choices:
            raise ValueError(f"{', '.join(choices)}, or empty")
        return text

    return parse


def up_to(largest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) <= largest):
            raise ValueError(f"a number between 0 and {largest}")
        return int(text)

    return parse


def probability(text: str) -> float:
    refusal = ValueError("a probability between 0 and 1")
    try:
        value = float(text)
    except ValueError:
        raise refusal from None
    if not 0 <= value <= 1:
        raise refusal
    return value


CACHE = Variable(
    "SGLANG_ASCEND_CACHE",
    path,
    "~/.cache/sglang-ascend",
    "Folder in which ready checkpoints are built and kept.",
)

ADAPTIVE_COSTS = Variable(
    "SGLANG_ASCEND_ADAPTIVE_COSTS",
    optional_path,
    "",
    "JSON file in which a server with --speculative-adaptive keeps what its steps cost, for the "
    "next start; empty: each start learns it anew.",
)

DRAFT_P_MIN = Variable(
    "SGLANG_ASCEND_DRAFT_P_MIN",
    probability,
    "0",
    "A step drafts no further where the MTP layer gives all that it has drafted a smaller "
    "probability to be kept; 0: as many as --speculative-num-steps says.",
)

LOOKUP_DRAFTS = Variable(
    "SGLANG_ASCEND_LOOKUP_DRAFTS",
    up_to(15),
    "0",
    "Most tokens that a step drafts by prompt lookup, where that is worth more than what the MTP "
    "layer drafts; 0: none.",
)

LOSSY_ACCEPTANCE = Variable(
    "SGLANG_ASCEND_LOSSY_ACCEPTANCE",
    str,
    "",
    "Accepts drafts that the model would not have drawn, so that replies change: threshold:RATIO "
    "(p >= RATIO q) or relaxed:TOP_N,DELTA[,START,END] inside a thinking section.",
)

TRACE = Variable(
    "SGLANG_ASCEND_TRACE",
    optional_path,
    "",
    "Folder for a trace of every speculative step, which Perfetto opens; empty: none is written.",
)

LOG_WAITS = Variable(
    "SGLANG_ASCEND_LOG_WAITS",
    switch,
    "",
    "1: a server's log has a line for each wait for a stream, by torch_npu's sync debug mode.",
)

TRUST_COPY_ORDER = Variable(
    "SGLANG_ASCEND_TRUST_COPY_ORDER",
    switch,
    "",
    "1: on an NPU kernels are trusted to run after a copy from pinned memory that was queued "
    "before them; otherwise the host waits for such a copy.",
)

HOOKS = Variable(
    "SGLANG_ASCEND_HOOKS",
    one_of("required", "all"),
    "",
    "Which hooks change SGLang. Empty: all, on the CPU and where MTP serves; required: there only "
    "those without which nothing is served; all: all, in every server.",
)

SERVES_MTP = Variable(
    "SGLANG_ASCEND_SERVES_MTP",
    switch,
    "",
    "Set by a server for the processes that it starts, and not to be set by hand.",
)

VARIABLES: tuple[Variable, ...] = (
    CACHE,
    ADAPTIVE_COSTS,
    DRAFT_P_MIN,
    LOOKUP_DRAFTS,
    LOSSY_ACCEPTANCE,
    TRACE,
    LOG_WAITS,
    TRUST_COPY_ORDER,
    HOOKS,
    SERVES_MTP,
)


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each SGLANG_ASCEND_* variable that is set and that nothing reads."""
    known = [variable.name for variable in VARIABLES]
    present = os.environ if environ is None else environ
    sentences = []
    for name in sorted(set(present) - set(known)):
        if name.startswith(PREFIX):
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
            sentences.append(f"{name} is set but nothing reads it: {remedy}")
    return sentences
