"""SGLANG_ASCEND_ADAPTIVE_COSTS: what a server's steps cost, from one start to the next."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang_ascend import env
from sglang_ascend.plugin.errors import StartupRefused
from sglang_ascend.plugin.mtp.adaptive.refusals import file_of_costs
from sglang_ascend.speculative.adaptive.costs.every_load import Costs
from sglang_ascend.speculative.adaptive.costs.kept import (
    KeptCosts,
    KeptCostsError,
    kept,
    read,
    write,
)

# Writing takes half a millisecond.
STEPS_BETWEEN = 256

logger = logging.getLogger(__name__)


class CostsFile:
    """The file of one server, which is written while it serves: it may be killed."""

    def __init__(self, path: Path, of: dict[str, str], costs: Costs) -> None:
        self.costs, self._path, self._of = costs, path, of
        self._steps, self._failed = 0, False

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        if self._steps % STEPS_BETWEEN == 0 and not self._failed:
            self._write()

    def _write(self) -> None:
        try:
            write(self._path, kept(self.costs, self._of))
        except OSError as error:
            self._failed = True
            logger.warning(
                "%s=%s cannot be written any more (%s): the next start will not know what this "
                "server's steps cost.",
                env.ADAPTIVE_COSTS.name,
                self._path,
                error.strerror,
            )


def refuse_bad_costs(server_args: Any) -> None:
    """Before any weight is read. Raises StartupRefused."""
    path = file_of_costs()
    if path is not None:
        _read(path, costs_of(server_args))


def make_costs_file(server_args: Any) -> CostsFile | None:
    """Of the rank that decides. Raises StartupRefused."""
    path = file_of_costs()
    if path is None:
        return None
    of = costs_of(server_args)
    content = _read(path, of)
    if content.loads:
        logger.info("What steps cost is known of %d loads, by %s.", len(content.loads), path)
    return CostsFile(path, of, content.restored())


def costs_of(server_args: Any) -> dict[str, str]:
    """What a cost holds for. Before and behind SGLang's own changes to the flags the same."""
    flags = {
        "--model-path": server_args.model_path,
        "--speculative-draft-model-path": (
            server_args.speculative_draft_model_path or server_args.model_path
        ),
        "--tp-size": server_args.tp_size,
    }
    return {flag: str(value) for flag, value in flags.items()}


def _read(path: Path, of: dict[str, str]) -> KeptCosts:
    """Nothing is known where there is no file yet; that one can be written is tried."""
    try:
        content = read(path) if path.exists() else KeptCosts(of=of, loads=[])
        _refuse_others(path, content.of, of)
        write(path, content)
    except KeptCostsError as error:
        raise StartupRefused(f"{env.ADAPTIVE_COSTS.name}: {error}") from None
    except OSError as error:
        raise StartupRefused(
            f"{env.ADAPTIVE_COSTS.name}={path} cannot hold what steps cost ({error.strerror}): "
            "name a file in a folder that you may write to, or unset it."
        ) from None
    return content


def _refuse_others(path: Path, found: dict[str, str], served: dict[str, str]) -> None:
    """Raises StartupRefused."""
    for flag, value in served.items():
        if found.get(flag) != value:
            raise StartupRefused(
                f"{env.ADAPTIVE_COSTS.name}={path} holds what steps cost with {flag} "
                f"{found.get(flag)}, and {value} is served: name a file for each."
            )
