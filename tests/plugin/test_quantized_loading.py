"""What SGLang's loader is given of a quantized checkpoint, at a start and for an update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import packers
import pytest
import torch

from sglang_ascend.quantization.layouts import METHODS

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("loaded_plugins")]

TARGET, MTP = "model.layers.1.self_attn.o_proj", "model.layers.2.self_attn.o_proj"
CONFIG = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target's linear and its MTP layer's, by GPTQ, and a norm."""
    return write(tmp_path, [TARGET, MTP], {"model.norm.weight": np.ones(4)})


def write(folder: Path, quantized: list[str], floats: dict[str, np.ndarray]) -> Path:
    packed = packers.gptq()
    linear = {
        name.removeprefix("a.q_proj."): raw
        for name, raw in packed.tensors.items()
        if name.startswith("a.q_proj.")
    }
    packed.tensors = {name: packers.f32(values) for name, values in floats.items()}
    for module in quantized:
        packed.tensors |= packers.named(module, linear)
    packed.config |= CONFIG
    return packed.write(folder)


def read(folder: Path, is_draft: bool) -> dict[str, torch.Tensor]:
    """What SGLang's loader is given."""
    from sglang_ascend.plugin.quantization.loading import weights_of

    config = SimpleNamespace(is_draft_model=is_draft)
    source = SimpleNamespace(model_or_path=str(folder), model_config=config)
    return dict(weights_of(lambda *_, **__: iter(()), None, source))


@pytest.mark.parametrize("layout", [*METHODS, "modelslim"])
def test_sglang_knows_the_name_of_every_layout(layout):
    from sglang.srt.layers.quantization import get_quantization_config

    assert get_quantization_config(layout)


@pytest.mark.parametrize(("is_draft", "modules"), [(False, [TARGET, MTP]), (True, [MTP])])
def test_a_draft_reads_no_linear_of_its_target(folder, is_draft, modules):
    names = [*read(folder, is_draft)]
    assert names == ["model.norm.weight", *(f"{module}.weight" for module in modules)]


def test_a_weight_that_sglang_concatenates_with_a_float_one_is_float(tmp_path, caplog):
    first, second, other = (
        f"model.layers.0.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    )
    floats = {f"{second}.weight": np.ones((8, 4))}
    found = read(write(tmp_path, [first, other], floats), is_draft=False)
    assert found[f"{first}.weight"].is_floating_point()
    assert found[f"{other}.weight"].dtype == torch.uint8
    assert "q_a_proj is concatenated with a float weight" in caplog.text


def model_with(method: object) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.quant_method = method
    return model


def test_float_layers_refuse_a_quantized_folder_and_quantized_ones_single_tensors(folder):
    from sglang_ascend.plugin.quantization.linear import QuantizedLinear
    from sglang_ascend.plugin.quantization.updates import refused_folder, refused_tensors

    floats, quantized = model_with(object()), model_with(QuantizedLinear("o_proj"))
    assert "this server's layers are float" in str(refused_folder(floats, str(folder)))
    assert refused_folder(quantized, str(folder)) is None
    assert refused_tensors(floats) is None
    assert "/update_weights_from_disk" in str(refused_tensors(quantized))
    (folder / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in str(refused_folder(quantized, str(folder)))
