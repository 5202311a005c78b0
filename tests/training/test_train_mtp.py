"""Invariant: `sglang-ascend train-mtp` takes a target to a folder that is served, and whatever
stops it on the way, the same command ends in the same weights."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from begun import Program, template
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny_targets import write_target
from typer.testing import CliRunner

from sglang_ascend.checkpoint import validate_checkpoint
from sglang_ascend.cli import app
from sglang_ascend.quantization.writers import saving
from sglang_ascend.training import provenance
from sglang_ascend.training.generation.shards import read_prompt_list
from sglang_ascend.training.run_folder import CHECKPOINT

STEPS = 60
PROMPTS = [f"Write the {' x' * n} ? a {'the ' * n}" for n in range(1, 13)]
BASE = ("--tokens", "300", "--max-length", "64", "--max-new-tokens", "20", "--vocabulary", "8")
BASE += ("--tokens-per-batch", "300", "--own-share", "0.5", "--threads", "1", "--num-steps", "2")


def arguments(target: Path, out: Path, *more: object, steps: int = STEPS) -> list[str]:
    held_out = target.parent / "held-out.json"
    common = ("--out", out, "--held-out", held_out, "--max-steps", steps, *BASE, *more)
    return ["train-mtp", str(target), *map(str, common)]


def train_mtp(target: Path, out: Path, *more: object, steps: int = STEPS) -> str:
    """Everything that the command said."""
    result = CliRunner().invoke(app, arguments(target, out, *more, steps=steps))
    assert result.exit_code == 0, result.output
    return result.output


def refusal(target: Path, out: Path, *more: object, steps: int = STEPS) -> str:
    """The one sentence that the command ends with."""
    result = CliRunner().invoke(app, arguments(target, out, *more, steps=steps))
    assert result.exit_code == 2, result.output
    (line,) = [row for row in result.stderr.splitlines() if row.startswith("sglang-ascend: ")]
    assert "Traceback" not in result.output
    return line


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "held-out.json").write_text(json.dumps(["a x the ?", "Write a ? x"]))
    return write_target(folder / "target", "LlamaForCausalLM")


@pytest.fixture(scope="module")
def finished(target) -> Path:
    """The folder of a command that nothing stopped."""
    train_mtp(target, target.parent / "finished")
    return target.parent / "finished"


@pytest.fixture
def generated(finished, tmp_path) -> Path:
    """The same folder as it was before training began."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "run")
    record = json.loads((out / "stages.json").read_text())
    kept = {name: record["stages"][name] for name in ("held-out replies", "generate")}
    (out / "stages.json").write_text(json.dumps({"stages": kept}))
    return out


def same_weights(first: Path, second: Path) -> bool:
    """Of two work folders: all that training keeps, bit by bit."""
    one, two = (load_file(out / "run" / CHECKPOINT) for out in (first, second))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_command_ends_in_a_folder_that_is_served_and_says_where_it_comes_from(target, finished):
    summary = validate_checkpoint(finished / "model")
    assert summary is not None
    assert summary.num_mtp_tensors > 0
    record = json.loads((finished / "model" / "provenance.json").read_text())
    assert record["sha256"]["target"]["model.safetensors"] == provenance.sha256(
        target / "model.safetensors"
    )
    for name, digest in record["sha256"]["model"].items():
        assert provenance.sha256(finished / "model" / name) == digest
    assert record["data"]["sampled_tokens"] >= 300
    assert record["options"]["loss"] == "kl"
    length = record["acceptance"]["trained"]["all"].get("acceptance_length", 1)
    assert 1 <= length <= 3
    ids = json.loads((finished / "model" / "draft_vocabulary.json").read_text())["token_ids"]
    assert len(ids) == 8


def test_the_plots_and_the_log_show_acceptance_at_each_position(finished):
    looks = provenance.read_log(finished / "run" / "acceptance.jsonl")
    assert looks[-1]["step"] == STEPS
    assert len(looks) >= 4
    assert all(len(look["accepted"]) == 2 for look in looks)
    for name in ("loss.svg", "acceptance.svg"):
        lines = ElementTree.parse(finished / name).findall(".//{*}polyline")
        assert len(lines) == 2
        points = [point.split(",") for point in lines[0].attrib["points"].split()]
        assert len(points) > 3
        assert all(0 <= float(x) <= 760 and 0 <= float(y) <= 360 for x, y in points)


def test_acceptance_is_watched_whatever_the_products_are(target, finished, generated):
    """Products in bfloat16 are a GPU's default; held-out replies are judged in float32."""
    train_mtp(target, generated, "--dtype", "bfloat16")
    steps, whole = (
        [look["step"] for look in provenance.read_log(out / "run" / "acceptance.jsonl")]
        for out in (generated, finished)
    )
    assert steps == whole
    assert not same_weights(finished, generated)


def test_what_is_done_is_not_done_again(target, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    said = train_mtp(target, finished)
    assert said.count("done before") == 6
    kept = ("lock", "stages.json")
    changed = [p for p, t in before.items() if p.stat().st_mtime_ns != t and p.name not in kept]
    assert changed == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("--seed", "7"), "--seed is 7 and was 0"),
        (("--loss", "tv"), "--loss is tv and was kl"),
        (("--temperature-mix", "0,1"), "--temperature-mix is [0.0, 1.0] and was"),
        (("--tokens", "200"), "--tokens is 200 and was 300"),
    ],
)
def test_an_option_that_would_spoil_a_stage_is_refused_by_name(target, finished, change, name):
    said = refusal(target, finished, *change)
    assert name in said
    assert "another --out" in said


def test_another_chat_template_makes_the_target_another(target, finished, tmp_path):
    """Replies to what no server asks would be said to be done."""
    folder = tmp_path / "other"
    shutil.copytree(target, folder / "target")
    shutil.copy(target.parent / "held-out.json", folder)
    assert train_mtp(folder / "target", finished).count("done before") == 6  # the control
    (template,) = (folder / "target").glob("chat_template*")
    template.write_text(template.read_text() + " ")
    assert "TARGET is content" in refusal(folder / "target", finished)


def test_a_loss_that_is_none_is_refused_before_anything_is_written(target, tmp_path):
    assert "--loss k1 is none of ce, kl" in refusal(target, tmp_path / "out", "--loss", "k1")
    assert not (tmp_path / "out" / "stages.json").exists()


def test_a_training_that_kept_nothing_may_begin_again_otherwise(target, generated, monkeypatch):
    """Such as by fewer tokens a batch, where memory was short."""
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", full_after(0, CHECKPOINT))
        assert "No space left" in refusal(target, generated)
    train_mtp(target, generated, "--loss", "tv", steps=6)
    assert "--loss is kl and was tv" in refusal(target, generated)


def test_a_finished_training_is_prolonged(target, finished, tmp_path):
    out = tmp_path / "longer"
    shutil.copytree(finished, out)
    before = (out / "model" / "model.safetensors").read_bytes()
    said = train_mtp(target, out, steps=STEPS + 6)
    assert said.count("done before") == 2
    lines = (out / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 7))
    assert (out / "model" / "model.safetensors").read_bytes() != before
    assert "--max-steps is 60 and was 66" in refusal(target, out)


def begun(words: list[str]) -> Program:
    """The command in a process of its own, in silence."""
    with open(os.devnull, "r+b") as nothing:
        streams = [nothing.fileno()] * 3
        return template().begin(["sglang_ascend", *words], os.environ, *streams)


def kill_at(target: Path, out: Path, step: int, *more: object) -> None:
    """SIGKILL once the log has `step` lines; no step is skipped by a kill."""
    log = out / "run" / "log.jsonl"
    running = begun(arguments(target, out, *more))
    while running.poll() is None:
        if log.exists() and log.read_text().count("\n") >= step:
            os.kill(running.pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    assert running.wait() == -signal.SIGKILL, f"it ended before step {step}"


def test_training_killed_at_random_ends_in_the_same_weights(target, finished, generated):
    steps = sorted(random.sample(range(1, STEPS - 20), 2))
    for step in steps:
        kill_at(target, generated, step)
    train_mtp(target, generated)
    assert same_weights(finished, generated), f"killed at {steps}"
    one, two = (out / "model" / "model.safetensors" for out in (finished, generated))
    assert one.read_bytes() == two.read_bytes()


def test_on_policy_rounds_follow_a_finished_training_and_may_be_killed(target, finished, tmp_path):
    """Control: as many more steps on every row end in other weights."""
    rounds = ("--on-policy-rounds", 2)
    for name in ("whole", "killed", "plain"):
        shutil.copytree(finished, tmp_path / name)
    train_mtp(target, tmp_path / "whole", *rounds)
    kill_at(target, tmp_path / "killed", STEPS + 5, *rounds)
    train_mtp(target, tmp_path / "killed", *rounds)
    train_mtp(target, tmp_path / "plain", steps=STEPS + 2 * (STEPS // 4))
    log = provenance.read_log(tmp_path / "whole" / "run" / "log.jsonl")
    assert [line["step"] for line in log] == list(range(1, STEPS + 2 * (STEPS // 4) + 1))
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    assert not same_weights(tmp_path / "whole", tmp_path / "plain")


def test_a_resume_that_forgets_the_optimizer_ends_in_others(target, finished, generated):
    """Control of the comparison above."""
    kill_at(target, generated, 30)
    path = generated / "run" / CHECKPOINT
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    state = {k: v for k, v in load_file(path).items() if not k.startswith("optimizer.")}
    save_file(state, path, metadata=metadata)
    train_mtp(target, generated)
    assert not same_weights(finished, generated)


def full_after(allowed: int, name: str) -> Callable[..., None]:
    """A `save_file` that finds the disk full behind so many files of a `name`, and says so as
    safetensors does."""
    left = iter(range(allowed))

    def save(tensors, path, metadata=None):
        if name in str(path) and next(left, None) is None:
            Path(path).write_bytes(b"cut")
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        save_file(tensors, path, metadata=metadata)

    return save


def test_a_full_disk_loses_nothing(target, finished, generated, monkeypatch):
    """First the log, whose writes to /dev/full find no space, then a checkpoint, then the model."""
    log = generated / "run" / "log.jsonl"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    assert f"no space is left for {generated}: free some and run" in refusal(target, generated)
    log.unlink()
    for allowed, name in (
        (4, "run/checkpoint.safetensors.part"),
        (0, ".model.part.unfinished/model.part/model.safetensors"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(saving, "save_file", full_after(allowed, name))
            said = refusal(target, generated)
        assert f"{generated}/{name}" in said and "free space" in said
    train_mtp(target, generated)
    assert same_weights(finished, generated)


def test_a_damaged_shard_is_named_and_made_again(target, generated):
    (*_, shard) = sorted((generated / "data").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 0x40
    for damaged in (bytes(content), bytes(content[: len(content) // 2]), b""):
        shard.write_bytes(damaged)
        said = refusal(target, generated)
        assert str(shard) in said
        assert "delete it and run the same command again" in said
    shard.unlink()
    train_mtp(target, generated)
    assert provenance.generated(generated / "data")["sampled_tokens"] >= 300


def test_a_shard_that_is_lost_in_the_middle_of_training_is_made_again(target, generated):
    kill_at(target, generated, 20)
    (first, *_) = sorted((generated / "data").glob("*.safetensors"))
    first.unlink()
    train_mtp(target, generated)
    log = provenance.read_log(generated / "run" / "log.jsonl")
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))


def test_the_users_prompts_are_each_used_once_and_some_are_held_out(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS + PROMPTS[:3]]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    asked = arguments(target, tmp_path / "out", "--prompts", prompts, "--own-share", "0", steps=6)
    place = asked.index("--held-out")
    result = CliRunner().invoke(app, asked[:place] + asked[place + 2 :])
    assert result.exit_code == 0, result.output
    assert "--prompts gave" in result.output
    used = [
        prompt
        for path in sorted((tmp_path / "out" / "data").glob("*.safetensors"))
        for prompt in read_prompt_list(path)
    ]
    assert len(used) == len(set(used))
    assert set(used) <= set(PROMPTS[1:])  # the first is held out
    assert len(used) >= 8  # others loop at once and are dropped
    prompts.write_text("\n".join(json.dumps(row) for row in rows[::-1]))  # others are held out
    result = CliRunner().invoke(app, asked[:place] + asked[place + 2 :])
    assert "sglang-ascend: --prompts is content" in result.stderr


def test_prompts_that_are_too_long_are_said_to_be(target, tmp_path):
    """And not that no reply was worth keeping, for which other prompts would be the remedy."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([text + " the" * 80 for text in PROMPTS]))
    asked = ("--prompts", prompts, "--own-share", "0")
    said = refusal(target, tmp_path / "out", *asked, steps=6)
    assert "12 prompts are too long and were left out: of the 64 tokens" in said
    assert "A larger --max-length, with a new --out, takes them." in said
    prompts.write_text(json.dumps([*PROMPTS, "the" + " x" * 80]))
    said = train_mtp(target, tmp_path / "some", *asked, steps=6)
    assert "1 prompts are too long" in " ".join(said.split())


def test_what_kept_nothing_may_begin_again_otherwise(target, tmp_path):
    """Its sentence asks for other prompts, or for more text."""
    prompts, text, out = tmp_path / "prompts.json", tmp_path / "text.txt", tmp_path / "out"
    prompts.write_text(json.dumps([prompt + " the" * 80 for prompt in PROMPTS]))
    text.write_text("x")
    asked = ("--prompts", prompts, "--own-share", "0", "--text", text, "--text-tokens", "20")
    assert "12 prompts are too long" in refusal(target, out, *asked, steps=6)
    prompts.write_text(json.dumps(PROMPTS))
    assert f"{text} has no text of 8 tokens: give more" in refusal(target, out, *asked, steps=6)
    text.write_text("Write the x ? a the user\n" * 9)
    assert train_mtp(target, out, *asked, steps=6).count("done before") == 2
    for changed, name in ((text, "--text"), (prompts, "--prompts")):  # the controls
        changed.write_text(json.dumps(PROMPTS[::-1]))
        assert f"{name} is content" in refusal(target, out, *asked, steps=6)


def test_text_that_cannot_be_read_is_refused_before_anything_is_generated(target, tmp_path):
    lines, notes = tmp_path / "lines.jsonl", tmp_path / "notes.md"
    lines.write_text('"Write the x ? a the user x ? the x"\n' * 9 + '{"text": \n"x"\n')
    notes.write_text("Write the x ? a the user x ? the x\n" * 9)
    for text, said in ((lines, f"{lines}:10 is not JSON"), (notes, f"{notes} is none of .txt")):
        assert said in refusal(target, tmp_path / "out", "--text", text)
        assert not (tmp_path / "out" / "data").exists()


def test_text_is_learned_from_beside_the_replies(target, finished, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Write the x ? a the user\n" * 40 + "a x ? the\n" * 30)
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    said = train_mtp(target, out, "--text", text, "--text-tokens", 100, steps=STEPS + 6)
    assert "3/7 text" in said
    assert said.count("done before") == 2
    record = json.loads((out / "model" / "provenance.json").read_text())
    assert record["data"]["text_tokens"] >= 100
    assert record["sha256"]["prompts and text"]["text.txt"] == provenance.sha256(text)
    with_text = (out / "model" / "model.safetensors").read_bytes()
    assert with_text != (finished / "model" / "model.safetensors").read_bytes()
    assert "--text is content" in refusal(target, out, steps=STEPS + 6)
    (tmp_path / "more").mkdir()
    more = tmp_path / "more" / "text.txt"
    more.write_text("Write a x the user ?\n" * 40)
    hashes = provenance.hashes([text, more, text])
    assert hashes == {str(path): provenance.sha256(path) for path in (text, more)}
    gone = tmp_path / "gone.txt"
    assert f"{gone} does not exist" in refusal(target, tmp_path / "new", "--text", gone)


def test_what_cannot_be_used_is_refused_in_one_sentence(target, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert f"{empty} holds no prompt" in refusal(target, tmp_path / "a", "--prompts", empty)
    assert "gone.json" in refusal(target, tmp_path / "b", "--prompts", tmp_path / "gone.json")
    assert "no list of temperatures" in refusal(target, tmp_path / "c", "--temperature-mix", "hot")
    assert "none of float32, bfloat16" in refusal(target, tmp_path / "d", "--dtype", "int3")
    assert "is none of ce, kl" in refusal(target, tmp_path / "e", "--loss", "mse")
    without = tmp_path / "without"
    shutil.copytree(target, without / "target")
    shutil.copy(target.parent / "held-out.json", without)
    (without / "target" / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(without / "target", tmp_path / "f")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (target / name).read_bytes()
        (without / "target" / name).write_bytes(whole[: len(whole) // 2])
        said = refusal(without / "target", tmp_path / "f")
        assert f"{name} is not valid JSON; correct it or download it again" in said
        (without / "target" / name).write_bytes(whole)
    assert not (tmp_path / "f" / "data").exists()


def test_a_layer_that_lacks_a_tensor_is_refused_at_once_and_left_aside_by_init(
    target, finished, tmp_path
):
    cut = tmp_path / "cut"
    shutil.copytree(finished / "model", cut / "target")
    shutil.copy(target.parent / "held-out.json", cut)
    weights = load_file(cut / "target" / "model.safetensors")
    lost = next(name for name in weights if "mtp_layers" in name and "q_proj.weight" in name)
    save_file({n: w for n, w in weights.items() if n != lost}, cut / "target" / "model.safetensors")
    assert f"lacks {lost} (1 tensors" in refusal(cut / "target", tmp_path / "out", steps=6)
    assert not (tmp_path / "out" / "data").exists()
    train_mtp(cut / "target", tmp_path / "out", "--init", steps=6)
    report = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert report.keys() == {"trained"}


def test_a_second_command_in_the_same_folder_waits_for_no_one(target, generated):
    log = generated / "run" / "log.jsonl"
    running = begun(arguments(target, generated, steps=10_000))
    try:
        while not log.exists():
            assert running.poll() is None
            time.sleep(0.05)
        assert "another command is at work" in refusal(target, generated, steps=10_000)
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
