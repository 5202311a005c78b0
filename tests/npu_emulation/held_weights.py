"""python -m npu_emulation.held_weights FOLDER ARGUMENTS...: as npu_emulation.serve.

FOLDER/RANK.json gets the bytes that each module's weights take on the device once they are loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from npu_emulation import serve, serving
from npu_emulation.followers import own_rank


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a function or a dataclass keeps alive."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from tensors_of(cell.cell_contents)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def storages_of(value: Any) -> dict[int, int]:
    """Bytes by address, of what lies on the device."""
    storages = [t.untyped_storage() for t in tensors_of(value) if t.device.type == "npu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def held_by_modules(*models: torch.nn.Module) -> dict[str, int]:
    """By name, what a module holds that none before it does: MTP layers share the target's."""
    known: set[int] = set()
    found = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            method = getattr(getattr(module, "quant_method", None), "__dict__", {})
            parts = (vars(module), module._parameters, module._buffers, method)
            new: dict[int, int] = {}
            for value in chain.from_iterable(part.values() for part in parts):
                new |= {a: size for a, size in storages_of(value).items() if a not in known}
            known |= new.keys()
            found[f"{number}.{name}"] = sum(new.values())
    return found


def main() -> None:
    folder, started = Path(sys.argv.pop(1)), serving.started

    def started_and_counted(*args: Any) -> Any:
        scheduler = started(*args)
        draft = scheduler.draft_worker.draft_worker.draft_runner.model
        found = held_by_modules(scheduler.tp_worker.model_runner.model, draft)
        (folder / f"{own_rank()}.json").write_text(json.dumps(found))
        return scheduler

    serving.started = started_and_counted
    serve.main()


if __name__ == "__main__":
    main()
