"""What steps cost, kept in a JSON file: a server that starts again need not learn it anew."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_ascend.speculative.adaptive.costs.every_load import Costs
from sglang_ascend.speculative.adaptive.costs.one_load import Kind, LoadCosts

# Deviation of a logarithm: what the ratio of two costs may have changed by since they were kept.
CHANGED = 0.05


class KeptCostsError(ValueError):
    """The file is of no use; the message is one sentence that names it and the remedy."""


class KeptStep(BaseModel):
    """A kind of step at one load."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    drafts: int = Field(ge=0, le=15)  # of the MTP layer
    verified: int = Field(ge=0, le=15)
    ms: float = Field(gt=0, allow_inf_nan=False)
    deviation: float = Field(ge=0, allow_inf_nan=False)  # of log ms, beside the load's other kinds
    steps: int = Field(ge=1)  # that were timed

    @property
    def kind(self) -> Kind:
        return self.drafts, self.verified


class KeptLoad(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    batch: int = Field(ge=1)
    context: float = Field(ge=0, allow_inf_nan=False)
    kinds: list[KeptStep] = Field(min_length=1)


class KeptCosts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    of: dict[str, str]  # what was served, and how
    loads: list[KeptLoad]

    def restored(self) -> Costs:
        """The machine may be faster or slower now: the ratios of a load's costs are what is known
        of it."""
        costs = Costs()
        for load in self.loads:
            there = costs.of(load.batch, load.context)
            for step in load.kinds:
                deviation = math.hypot(step.deviation, CHANGED)
                there.restore(step.kind, step.ms / 1e3, deviation, step.steps)
        return costs


def kept(costs: Costs, of: Mapping[str, str]) -> KeptCosts:
    """What was timed of ``costs``, without what was guessed."""
    loads = [
        KeptLoad(batch=load.batch_size, context=load.context, kinds=_kinds(load))
        for load in costs.loads
        if load.measured()
    ]
    return KeptCosts(of=dict(of), loads=loads)


def _kinds(load: LoadCosts) -> list[KeptStep]:
    return [
        KeptStep(
            drafts=kind[0],
            verified=kind[1],
            ms=1e3 * load.seconds(kind),
            deviation=load.deviation(kind, load.best_known),
            steps=load.num_steps[i],
        )
        for kind, i in sorted(load.measured().items())
    ]


def read(path: Path) -> KeptCosts:
    """Raises KeptCostsError, and OSError where the file cannot be read."""
    try:
        return KeptCosts.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise KeptCostsError(
            f"{path} holds no costs of steps ({where}: {first['msg']}): delete it, or name another "
            "file."
        ) from None


def write(path: Path, content: KeptCosts) -> None:
    """Beside it and renamed: who is killed leaves the old file or the new one, and of several
    servers the last one's stays. Steps wait for it, so it does not wait for the disk. Raises
    OSError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    beside.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
