"""Invariant: a model folder is whole or absent, and is rebuilt only when its sources change."""

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from sglang_ascend.env import CACHE
from sglang_ascend.models import catalog
from sglang_ascend.models.catalog import Model, model_path

MODULE = """
from pathlib import Path

def build(folder):
    count = Path({counter!r})
    count.write_text(count.read_text() + "x")
    (folder / "config.json").write_text("{{}}")
    if Path({failing!r}).exists():
        raise FileNotFoundError("the wheel is missing: run `pip install it`.")
    (folder / "model.safetensors").write_text("weights")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A catalogue of one model whose builds are counted in `builds`."""
    (tmp_path / "builds").write_text("")
    source = tmp_path / "toy_model_module.py"
    names = {"counter": str(tmp_path / "builds"), "failing": str(tmp_path / "failing")}
    source.write_text(MODULE.format(**names))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_model_module", raising=False)
    monkeypatch.setattr(Model, "sources", property(lambda model: [source]))
    monkeypatch.setattr(catalog, "MODELS", {"toy": Model("toy_model_module", "toy")})
    return tmp_path


def builds(folder):
    return len((folder / "builds").read_text())


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'gpt' is not a model.* smollm2-mtp or nano-deepseek"):
        model_path("gpt", tmp_path)


def test_a_second_call_reuses_the_folder(toy):
    folder = model_path("toy", toy / "cache")
    assert model_path("toy", toy / "cache") == folder
    assert (folder / "model.safetensors").read_text() == "weights"
    assert builds(toy) == 1


def test_a_changed_source_rebuilds(toy):
    model_path("toy", toy / "cache")
    source = toy / "toy_model_module.py"
    source.write_text(source.read_text() + "\n")
    model_path("toy", toy / "cache")
    assert builds(toy) == 2


def test_a_failed_build_leaves_neither_folder_nor_remains(toy):
    (toy / "failing").write_text("")
    with pytest.raises(FileNotFoundError, match="run `pip install it`"):
        model_path("toy", toy / "cache")
    assert [path.name for path in (toy / "cache").iterdir() if path.is_dir()] == []
    (toy / "failing").unlink()
    assert model_path("toy", toy / "cache").is_dir()


def test_two_processes_build_once(toy):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=model_path, args=("toy", toy / "cache")) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert builds(toy) == 1


def test_nothing_is_printed_on_standard_output(toy, capfd):
    model_path("toy", toy / "cache")
    assert capfd.readouterr().out == ""


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_ASCEND_CACHE", str(tmp_path / "elsewhere"))
    assert CACHE.get() == tmp_path / "elsewhere"
    monkeypatch.delenv("SGLANG_ASCEND_CACHE")
    assert CACHE.get() == Path.home() / ".cache" / "sglang-ascend"


def test_every_model_has_its_artifact_and_provenance():
    for name, model in catalog.MODELS.items():
        sources = {path.name for path in model.sources}
        assert f"{model.module.rsplit('.', 1)[1]}.py" in sources
        assert "provenance.json" in sources, name
        folder = Path(catalog.__file__).parent / "artifacts" / model.artifact
        assert json.loads((folder / "provenance.json").read_text())
