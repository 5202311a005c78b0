"""From a float checkpoint to a quantized one, layer by layer; a killed run goes on where it was."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_ascend.checkpoint.errors import CheckpointError, shown
from sglang_ascend.checkpoint.folder import model_files
from sglang_ascend.checkpoint.values import refuse_not_finite
from sglang_ascend.ptq.calibration import Inputs, float_inputs, quantize_linear, walked
from sglang_ascend.ptq.folding import side_file
from sglang_ascend.ptq.folding.smooth import admitted, folded, smoothings
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.mixture.sets import OWN_ONLY, Mixture
from sglang_ascend.ptq.progress import Partial, claimed, differing
from sglang_ascend.ptq.solved import Summary, quantized_view, refuse_unwritable
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.convert import convert
from sglang_ascend.quantization.layouts.ours import (
    SIDE_FILE,
    read_side_file,
    sha256,
    write_side_file,
)
from sglang_ascend.quantization.qconfig import QConfig, layout_of
from sglang_ascend.quantization.recipe import Recipe
from sglang_ascend.quantization.transforms.process import FlexSmooth
from sglang_ascend.quantization.verification import check_hashes
from sglang_ascend.quantization.weight import HEAD, WEIGHT_ONLY
from sglang_ascend.quantization.writers import make_writer
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.quantized import linears

JUDGING_TEXTS = 16  # where nothing is fitted to the inputs, and only their errors are averaged


class Quantization:
    """One run of a recipe over a checkpoint.

    Args:
        folder: the float checkpoint.
        out: the new folder; unfinished layers lie in `out` + ".partial".
        seed, num_texts: of the calibration text.
        calibrate: sets and ratios of the text (see `Mixture`).
        smoothing: a folder that `run` wrote, whose scales are folded in place of searched ones.

    Raises:
        CheckpointError: the source is quantized, incomplete or of an unknown family, or the recipe
            matches none of its linears.
        ValueError: `calibrate` is no mixture, or the recipe calibrates nothing.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        out: Path,
        seed: int = 0,
        num_texts: int = 128,
        calibrate: str = OWN_ONLY,
        smoothing: Path | None = None,
    ) -> None:
        if not out.name:
            raise ValueError(f"--out {out} exists; name a new folder")
        self.target, self.recipe, self.out = Target.open(folder), recipe, out
        self.layers = Layers(self.target, Weights(folder))
        self.target.check_tensors()
        if has_mtp := self.target.has_own_layer:
            self.target.check_own_layer()
        self.num_parts = self.layers.num_layers + has_mtp
        self.schemes: list[dict[str, QConfig]] = []
        self.fallbacks, self.left_float = [], []
        for number in range(self.num_parts):
            self.schemes.append(self._schemes_of(number))
        self.head_scheme = recipe.head_scheme
        if self.head_scheme is not None and self.head_scheme.calibrated:
            raise CheckpointError(
                f"recipe {shown(recipe.name)} calibrates {HEAD}, which is rounded to nearest only; "
                "give it method minmax and inputs per_token or none"
            )
        asked = [scheme for schemes in self.schemes for scheme in schemes.values()]
        if smoothing is not None and recipe.smoothing is None:
            raise ValueError(f"recipe {recipe.name} smooths nothing; leave out --smoothing")
        self.smoothing, self.mixture = smoothing, None
        self.searches = recipe.smoothing is not None and smoothing is None
        if self.searches or any(scheme.calibrated for scheme in asked):
            is_fitted = self.searches or any(scheme.fitted for scheme in asked)
            used = num_texts if is_fitted else min(num_texts, JUDGING_TEXTS)
            self.mixture = Mixture(calibrate, used, seed)
            self.target.check_tokenizer()
        elif calibrate != OWN_ONLY:
            raise ValueError(f"recipe {recipe.name} calibrates nothing; leave out --calibrate")
        if not any(self.schemes):
            raise CheckpointError(
                f"recipe {shown(recipe.name)} matches no linear of {shown(folder)}; write its "
                "include as globs of names such as model.layers.0.self_attn.o_proj"
            )
        held = [*asked, *([self.head_scheme] if self.head_scheme else [])]
        self.layout = layout_of(held)
        refuse_unwritable(held, self.layout, self.layers.weights.checkpoint)

    def _schemes_of(self, number: int) -> dict[str, QConfig]:
        """By the names that the linears have inside their layer."""
        found, prefix = {}, self.layers.prefix(number)
        for name, linear in linears(self.layers.skeleton(number)):
            asked = self.recipe.scheme(prefix + name)
            if asked is None:
                self.left_float.append(prefix + name)
                continue
            found[name] = asked.fitting(linear.in_features)
            if found[name] is not asked:
                self.fallbacks.append(prefix + name)
        return found

    def run(self, progress: Callable[[str], object] = lambda step: None) -> Summary:
        """Quantizes what is left to do and writes `out`, which appears when it is complete.

        Args:
            progress: called with the name of each finished part.

        Raises:
            CheckpointError: `out` exists and is another recipe's, or the layout cannot hold what
                the recipe asks for.
            ValueError: another command is at work on `out`.
        """
        unfinished = self.out.with_name(self.out.name + ".partial")
        if self._is_written():
            check_hashes(Checkpoint.open(self.out))
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run killed behind its last step
            return self._summary(already_done=True)
        with claimed(unfinished):
            is_done = self._is_written()  # by a command that let go just now
            if not is_done:
                self._work(Partial(unfinished, self.task), progress)
            shutil.rmtree(unfinished, ignore_errors=True)
        return self._summary(is_done)

    def _work(self, partial: Partial, progress: Callable[[str], object]) -> None:
        with torch.inference_mode():
            if self.recipe.smoothing is not None:
                scales = self._scales(partial, self.recipe.smoothing, progress)
                whole = folded(self.layers, self.schemes, self.recipe.smoothing, scales)
                self.layers = Layers(self.target, Weights(whole))
            self._solve(partial, progress)
        self._write(partial)
        progress("written")

    def _scales(
        self, partial: Partial, rule: FlexSmooth, progress: Callable[[str], object]
    ) -> dict[str, Tensor]:
        """By pair; what was searched before, or is given, is read."""
        place = partial.folder / side_file.FOLDER
        source = self.smoothing / side_file.FOLDER if self.smoothing else place
        model, words = side_file.model_hashes(self.target.folder), rule.model_dump(mode="json")
        if self.searches and not (place / side_file.FOUND).exists():
            found = smoothings(self.layers, self.schemes, rule, self._text(partial), progress)
        else:
            pairs = admitted(self.layers, self.schemes, rule)
            found = side_file.read(source, pairs, model, words)
        if not (place / side_file.FOUND).exists():
            side_file.write(place, found, model, words)
        return {name: one.scale for name, one in found.items()}

    def _summary(self, already_done: bool) -> Summary:
        """From the finished checkpoint, which says whose inputs stayed float."""
        written, float_inputs, modules = Checkpoint.open(self.out).schemes, [], [*self.left_float]
        counts = Counter([] if self.head_scheme is None else [self.head_scheme.name])
        for number, schemes in enumerate(self.schemes):
            for name, scheme in schemes.items():
                module = self.layers.prefix(number) + name
                modules.append(module)
                if scheme.max_error and written[module].input_rule == WEIGHT_ONLY:
                    float_inputs.append(module)
                    scheme = scheme.with_float_inputs
                counts[scheme.name] += 1
        return Summary(
            counts,
            tuple(self.fallbacks),
            tuple(float_inputs),
            tuple(self.left_float),
            self.recipe.idle(modules),
            self.target.has_own_layer,
            already_done,
        )

    @property
    def num_steps(self) -> int:
        """Calls of `progress` in a whole run."""
        passes = 2 if self.searches else 1
        return passes * self.num_parts + (self.head_scheme is not None) + 1

    @property
    def task(self) -> dict[str, Any]:
        """What decides the result; a source that was replaced has another size or time."""
        stats = {path.name: path.stat() for path in model_files(self.target.folder)}
        source = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return {"source": source, **self._settings}

    @property
    def record(self) -> dict[str, Any]:
        """What the finished checkpoint says of itself; reads the whole source."""
        return {"model": side_file.model_hashes(self.target.folder), **self._settings}

    @property
    def _settings(self) -> dict[str, Any]:
        scales = {}
        if self.smoothing is not None:
            path = self.smoothing / side_file.FOLDER / side_file.SCALES
            scales = {"scales_sha256": sha256(path)}
        return scales | {
            "name": self.recipe.name,
            "spec": self.recipe.spec.model_dump(mode="json"),
            "calibration": self.mixture.manifest if self.mixture else None,
            "int8_per_channel_instead_of_groups": self.fallbacks,
        }

    def _is_written(self) -> bool:
        """Whether `out` is there; something else of that name is refused."""
        side = self.out / SIDE_FILE
        if not self.out.exists() and not self.out.is_symlink():
            return False
        held = read_side_file(side)[0] if side.exists() else None
        if held is None or (others := differing(held, self.record)):
            why = "" if held is None else f" (another {others})"
            raise CheckpointError(
                f"--out {shown(self.out)} exists and is not what this recipe and seed make of this "
                f"model{why}; name a new folder or move it away"
            )
        return True

    def _solve(self, partial: Partial, progress: Callable[[str], object]) -> None:
        """Finishes every layer that `partial` lacks. Inputs come from the float layers before it,
        so that no layer depends on how an earlier one was rounded."""
        wanted = {
            number: [name for name, scheme in schemes.items() if scheme.calibrated]
            for number, schemes in enumerate(self.schemes)
            if not partial.has(number)
        }
        prefixes = tuple(self.layers.prefix(number) for number in range(self.num_parts))
        tensors = self.target.tensors.items()
        refuse_not_finite(entry for n, entry in tensors if not n.startswith(prefixes))
        tokens = self._text(partial) if any(wanted.values()) else []
        for number, layer, inputs in walked(self.layers, tokens, wanted):
            self._finish(partial, number, layer, inputs, progress)
        if self.head_scheme is not None and not partial.has(self.num_parts):
            head = self.layers.head()
            linear = nn.Linear(*head.T.shape, bias=False, device="meta")
            linear.load_state_dict({"weight": head}, assign=True)
            partial.write(self.num_parts, {HEAD: quantize_linear(linear, self.head_scheme, None)})
            progress(HEAD)

    def _finish(
        self,
        partial: Partial,
        number: int,
        layer: nn.Module,
        inputs: Inputs,
        progress: Callable[[str], object],
    ) -> None:
        prefix, solved = self.layers.prefix(number), {}
        entries = [entry for n, entry in self.target.tensors.items() if n.startswith(prefix)]
        refuse_not_finite(entries)  # a scale would be that, or lose it in silence
        kept_float = float_inputs(layer, self.schemes[number], inputs)
        for name, linear in linears(layer):
            scheme = self.schemes[number].get(name)
            if scheme is not None:
                seen = inputs.of(name) if scheme.fitted else None
                scheme = scheme.with_float_inputs if name in kept_float else scheme
                solved[prefix + name] = quantize_linear(linear, scheme, seen)
        partial.write(number, solved)
        progress(prefix.removesuffix("."))

    def _text(self, partial: Partial) -> list[Tensor]:
        texts = partial.text()
        if texts is None:
            assert self.mixture is not None
            texts = self.mixture.texts(self.target)
            partial.keep_text(texts)
        return [text.tokens for text in texts]

    def _write(self, partial: Partial) -> None:
        """All layers as one checkpoint, complete before it gets its name."""
        whole = partial.folder / "whole"
        shutil.rmtree(whole, ignore_errors=True)  # of a run killed in here
        source = quantized_view(self.layers.weights.checkpoint, partial.modules())
        convert(source, whole, make_writer(self.layout, source.layout))
        if self.recipe.smoothing is not None:
            shutil.copytree(partial.folder / side_file.FOLDER, whole / side_file.FOLDER)
        write_side_file(whole, self.record)
        whole.rename(self.out)
