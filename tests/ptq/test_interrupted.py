"""Invariant: whatever stops a run of `quantize` or `convert` (a full disk, a second command in the
same folder, a damaged file), what is said is one sentence that names the file, and nothing that was
finished is lost or mixed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
from tiny_targets import write_target
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.cli import app
from sglang_ascend.ptq.grid.run import Options
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.quantization import convert as conversion
from sglang_ascend.quantization.layouts.ours import SIDE_FILE, sha256
from sglang_ascend.quantization.recipe import parse_recipe, read_recipe

LEARNED = """
spec:
  process:
    - type: linear_quant
      qconfig: {weight: {scope: per_channel, dtype: int8, method: lwc}}
"""


class Killed(Exception):
    pass


def kill(name):
    raise Killed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("tiny"), "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("wide"), "Qwen2ForCausalLM", intermediate_size=4096)


def stopped(tiny, out):
    """An unfinished run with one finished layer, as a kill leaves it."""
    with pytest.raises(Killed):
        task(tiny, out).run(kill)
    return out.with_name(out.name + ".partial")


def task(tiny, out, name="lwc"):
    return Quantization(tiny, parse_recipe(LEARNED, name), out, num_texts=2)


def bytes_of(folder):
    return {path.name: sha256(path) for path in folder.iterdir() if path.name != SIDE_FILE}


def limited(*arguments, size):
    """A command whose files may have `size` bytes: what a write beyond a quota meets."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    command = [sys.executable, "-m", "sglang_ascend", *map(str, arguments)]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_disk_that_takes_no_more_is_one_sentence_with_the_file(wide, tmp_path, command):
    out = tmp_path / "out"
    options = ["--recipe", "w8a8", "--out", out] if command == "quantize" else [out, "--to=float32"]
    result = limited(command, wide, *options, size=50_000)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"sglang-ascend: {tmp_path}/") and "cannot be written" in last
    assert "free space" in last and not out.exists()
    assert limited(command, wide, *options, size=10_000_000).returncode == 0 and out.exists()


def test_a_second_command_in_one_folder_is_refused_and_the_first_goes_on(tiny, tmp_path):
    out, seen = tmp_path / "out", []

    def second(name):
        seen.append(name)
        if name != "written":
            with pytest.raises(ValueError, match=r"another command is at work in .*partial: wait"):
                task(tiny, out).run()

    task(tiny, out).run(second)
    assert seen[-1] == "written" and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert task(tiny, out).run().already_done  # and may be given again


def test_one_that_waited_for_the_other_finds_its_output(tiny, tmp_path, monkeypatch):
    out, late = tmp_path / "out", task(tiny, tmp_path / "out")
    found = late._is_written
    monkeypatch.setattr(late, "_is_written", lambda: bool(task(tiny, out).run()) and False)
    with pytest.raises(OSError):  # the control: one that does not look again
        late.run()
    shutil.rmtree(out)
    answers = iter([lambda: bool(task(tiny, out).run()) and False, found])
    monkeypatch.setattr(late, "_is_written", lambda: next(answers)())
    assert late.run().already_done


@pytest.mark.parametrize("name", ["layer-00000.safetensors", "calibration.safetensors"])
def test_a_damaged_file_of_an_unfinished_run_is_named_and_can_be_deleted(tiny, tmp_path, name):
    partial = stopped(tiny, tmp_path / "out")
    (partial / name).write_bytes((partial / name).read_bytes()[:50])
    with pytest.raises(CheckpointError, match=rf"{name} is damaged .*; delete it") as said:
        task(tiny, tmp_path / "out").run()
    assert "\n" not in str(said.value)
    (partial / name).unlink()
    task(tiny, tmp_path / "out").run()
    task(tiny, tmp_path / "whole").run()
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_what_a_run_killed_amid_writing_left_is_deleted_by_the_next(tiny, tmp_path):
    partial = stopped(tiny, tmp_path / "out")
    (partial / ".whole.unfinished").mkdir()
    (partial / ".whole.unfinished" / "model.safetensors").write_text("half")
    seen = []
    task(tiny, tmp_path / "out").run(
        lambda name: seen.append((partial / ".whole.unfinished").exists())
    )
    assert seen[0] and not seen[-1]


def test_a_readme_may_change_before_the_run_goes_on_and_the_model_may_not(tiny, tmp_path):
    source, out = shutil.copytree(tiny, tmp_path / "source"), tmp_path / "out"
    before = Options(source).content
    stopped(source, out)
    (source / "README.md").write_text("About this model.")
    assert Options(source).content == before  # of a grid
    for name in ("config.json", "tokenizer.json"):  # the controls
        stat = (source / name).stat()
        os.utime(source / name)
        assert Options(source).content != before
        with pytest.raises(CheckpointError, match="unfinished layers of another model; name"):
            task(source, out).run()
        os.utime(source / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    task(source, out).run()
    assert (out / "README.md").exists()


CONVERT_KILLED = """
import os, signal, sys
from sglang_ascend.cli import app
from sglang_ascend.quantization import convert
convert._copy_companions = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
app(sys.argv[1:])
"""


def test_what_a_killed_conversion_left_is_deleted_by_the_next(tiny, tmp_path):
    """All of its weights, in a folder that no listing shows."""
    words = ["convert", str(tiny), str(tmp_path / "out"), "--to", "float32"]
    killed = subprocess.run([sys.executable, "-c", CONVERT_KILLED, *words], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert CliRunner().invoke(app, words).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_conversion_to_one_folder_is_refused_at_once(tiny, tmp_path, monkeypatch):
    """It would write everything, and then find the name taken."""
    words, seen = ["convert", str(tiny), str(tmp_path / "out"), "--to", "float32"], []
    copied = conversion._copy_companions

    def second(*given):
        seen.append(CliRunner().invoke(app, words))
        copied(*given)

    monkeypatch.setattr(conversion, "_copy_companions", second)
    assert CliRunner().invoke(app, words).exit_code == 0
    (refused,) = seen
    assert refused.exit_code == 2 and "another command is at work in" in refused.stderr
    assert refused.stderr.endswith("wait for it, or name another OUT.\n")


def test_a_recipe_by_another_path_is_the_same_recipe_and_what_differs_is_said(tiny, tmp_path):
    out = tmp_path / "out"
    stopped(tiny, out)
    with pytest.raises(CheckpointError, match="layers of another --seed, --calibration-texts or"):
        Quantization(tiny, parse_recipe(LEARNED, "lwc"), out, seed=1, num_texts=2).run()
    with pytest.raises(CheckpointError, match=r"layers of another --seed.*, recipe; name another"):
        Quantization(tiny, read_recipe("w8a8"), out).run()
    task(tiny, out, "./lwc").run()
    assert task(tiny, out, "lwc").run().already_done
    with pytest.raises(CheckpointError, match=r"this model \(another --seed"):
        Quantization(tiny, parse_recipe(LEARNED, "lwc"), out, seed=1, num_texts=2).run()


def test_a_finished_output_that_was_damaged_since_is_not_said_to_be_done(tiny, tmp_path):
    task(tiny, tmp_path / "out").run()
    weights = next((tmp_path / "out").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{weights.name} is not the file whose SHA-256 is"):
        task(tiny, tmp_path / "out").run()
    content[-5] ^= 1
    weights.write_bytes(content)
    assert task(tiny, tmp_path / "out").run().already_done  # the control


def test_an_out_without_a_name_is_refused_by_its_flag(tiny):
    result = CliRunner().invoke(app, ["quantize", str(tiny), "--recipe=w8a8", "--out", "."])
    assert result.exit_code == 2
    assert result.stderr == "sglang-ascend: --out . exists; name a new folder\n"
