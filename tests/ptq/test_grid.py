"""The grid's KL is that of a float64 model with the decoded weights; its folder resumes."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.cli import app
from sglang_ascend.files import alone_in, write_json
from sglang_ascend.models import catalog
from sglang_ascend.ptq.evaluate import Judge, Score
from sglang_ascend.ptq.folding.folded import FoldedCheckpoint
from sglang_ascend.ptq.grid import run as grid_run
from sglang_ascend.ptq.grid.cells import CELLS, chosen
from sglang_ascend.ptq.grid.page import figures
from sglang_ascend.ptq.grid.run import Grid, Options, Scored
from sglang_ascend.ptq.grid.sensitivity import sensitivity
from sglang_ascend.ptq.grid.solve import by_layer, matching, solve
from sglang_ascend.ptq.layers import Layers
from sglang_ascend.ptq.text import own_text, read_texts, replies_to
from sglang_ascend.ptq.weights import Weights
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.training.generation.outputs import chat_prompts
from sglang_ascend.training.targets.families import Target

DATA = Path(__file__).parents[1] / "data"
INCLUDE = "model.layers.*.mlp.shared_experts.*"  # transformers has these as plain linears
FEW = {"texts": 3, "calibration_texts": 2, "calibration_seeds": 2, "include": INCLUDE}


@pytest.fixture(scope="module")
def options(nano):
    return Options(nano, **FEW)


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    """A grid of three cells: its folder, and what it scored."""
    folder = tmp_path_factory.mktemp("grid") / "out"
    return folder, Grid(options, chosen("int2 minmax, int2 gptq, int8 minmax"), folder).run()


def replies_kl(target: Target, weights: dict, text) -> float:
    """In float64 by transformers, with the decoded `weights` by module; summed over the reply."""
    logits = []
    for replaced in ({}, weights):
        model = target.load_model(torch.float64)
        for module, weight in replaced.items():
            model.get_parameter(f"{module}.weight").copy_(weight.dequantize())
        mask = torch.ones(len(text.tokens), len(text.tokens), dtype=torch.bool).tril()[None, None]
        logits.append(model(text.tokens[None], attention_mask=mask).logits[0].double())
    p, q = (one[text.prompt_length - 1 : -1].log_softmax(-1) for one in logits)
    return float((p.exp() * (p - q)).sum())


@torch.inference_mode()
def test_the_kl_is_that_of_float64_with_the_decoded_weights(nano, finished):
    folder, scored = finished
    target, texts = Target.open(nano), read_texts(folder / "judged.safetensors")
    layers = Layers(target, Weights(nano))
    by_name = {one.cell.name: one for one in scored if not one.seed}
    for name, others in (("int2 minmax", "int8 minmax"), ("int2 gptq", "int2 minmax")):
        cell = by_name[name].cell
        path = folder / "calibration-0.safetensors"
        solved = solve(layers, cell, INCLUDE, [text.tokens for text in read_texts(path)])
        held = {name: one for name in matching(layers, INCLUDE) if (one := solved.quantized(name))}
        assert len(held) == 9
        by_hand = sum(replies_kl(target, held, text) for text in texts)
        found, other = (sum(s.reply_kl for s in by_name[n].scores) for n in (name, others))
        assert found == pytest.approx(by_hand, rel=1e-3)
        assert other != pytest.approx(by_hand, rel=0.05)  # the control: another cell's weights


def test_a_finished_cell_is_read_and_not_computed_again(options, finished, monkeypatch):
    folder, scored = finished
    computed = []

    def solving(layers, cell, *rest):
        computed.append(cell.scheme.weight.method)
        return solve(layers, cell, *rest)

    monkeypatch.setattr(grid_run, "solve", solving)
    cells = [one.cell for one in scored if not one.seed]
    assert Grid(options, cells, folder).run() == scored
    assert computed == []
    (folder / "cells" / "int2 gptq 1.json").unlink()  # as if the run had been killed before it
    again = Grid(options, cells, folder).run()
    assert computed == ["gptq"]
    assert [one.scores for one in again] == [one.scores for one in scored]
    other = replace(cells[0], scheme=CELLS[0].scheme)  # a cell whose scheme changed since
    Grid(options, [other], folder).run()
    assert computed == ["gptq", CELLS[0].scheme.weight.method]


def test_other_options_are_refused_by_their_names(options, finished, tmp_path):
    folder = finished[0]
    with pytest.raises(CheckpointError, match="another --include, --calibration-texts; name a new"):
        Grid(replace(options, include="*.down_proj", calibration_texts=3), CELLS, folder)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="holds something else"):
        Grid(options, CELLS, tmp_path)
    with pytest.raises(CheckpointError, match=r"no linear of .* matches attention"):
        Grid(replace(options, include="attention"), CELLS, tmp_path / "new")
    with pytest.raises(ValueError, match=r"--cells int5\* matches none of int8 A8 minmax, "):
        chosen("int8*, int5*")


def test_the_command_writes_a_page_a_plot_and_json(nano, finished):
    """On a finished folder, so that nothing is computed."""
    folder = finished[0]
    words = ["--texts", "3", "--calibration-texts", "2", "--calibration-seeds", "2"]
    command = ["evaluate", "--against", str(nano), "--grid", str(folder), "--include", INCLUDE]
    result = CliRunner().invoke(app, [*command, *words, "--cells", "int2 minmax,int2 gptq"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(folder / "grid.md")
    rows = json.loads((folder / "grid.json").read_text())
    assert [(row["method"], row["seeds"]) for row in rows] == [("minmax", []), ("gptq", [0, 1])]
    page = (folder / "grid.md").read_text()
    assert page.count("\n| int2 |") == 2 and "![KL of nano-deepseek's cells](grid.svg)" in page
    drawn = ElementTree.parse(folder / "grid.svg").getroot()
    assert sum(child.tag.endswith("circle") for child in drawn) == 2
    found = json.loads((folder / "sensitivity.json").read_text())
    lines = ElementTree.parse(folder / "sensitivity.svg").getroot()
    kinds = {name.rpartition(".")[2] for name in found}
    assert sum(child.tag.endswith("polyline") for child in lines) == len(kinds) == 8
    nothing = CliRunner().invoke(app, ["evaluate", "--against", str(nano)])
    assert nothing.exit_code == 2 and nothing.stderr.count("\n") == 1


def test_a_second_command_in_a_grid_is_refused(nano, finished):
    words = ["--texts", "3", "--calibration-texts", "2", "--calibration-seeds", "2"]
    command = ["evaluate", "--against", str(nano), "--grid", str(finished[0]), "--include", INCLUDE]
    with alone_in(finished[0], option="--grid"):
        result = CliRunner().invoke(app, [*command, *words, "--cells", "int2 minmax"])
    assert result.exit_code == 2
    assert f"another command is at work in {finished[0]}: wait" in result.stderr
    assert "another --grid." in result.stderr  # and once it let go, the command of the test before


@torch.inference_mode()
def test_of_two_grids_that_begin_at_once_one_is_refused(options, tmp_path, monkeypatch):
    """Each found no options there and wrote its own: cells of both would lie in one folder."""
    other, out, seen = replace(options, texts=4), tmp_path / "out", []

    def second(path, content):
        if not seen:
            seen.append(path)
            with pytest.raises(ValueError, match="another command is at work in"):
                Grid(other, CELLS, out)
        write_json(path, content)

    monkeypatch.setattr(grid_run, "write_json", second)
    Grid(options, CELLS, out)
    assert seen == [out / "options.json"]
    with pytest.raises(CheckpointError, match="cells by another --texts; name"):
        Grid(other, CELLS, out)


def test_a_linear_whose_inputs_have_one_large_channel_stands_out(nano):
    """A gain of a norm times 300, in the second layer only; the linears behind it stand out."""
    source = Checkpoint.open(nano)
    norm = "model.layers.1.self_attn.q_a_layernorm.weight"
    gain = torch.ones(source.entries[norm].shape[0])
    target, tokens = Target.open(nano), [torch.arange(10, 70)]
    planted = FoldedCheckpoint.of(source, {norm: gain.index_fill(0, torch.tensor([3]), 300.0)}, {})
    ratios = []
    for checkpoint in (planted, source):
        layers = Layers(target, Weights(checkpoint))
        found = sensitivity(layers, tokens, by_layer(layers, matching(layers, "*.q_b_proj")))
        one = found.pop("model.layers.1.self_attn.q_b_proj")
        others = found.values()
        ratios.append([one[by] / max(other[by] for other in others) for by in one])
    assert min(ratios[0]) > 3
    assert max(ratios[1]) < 3  # the control: nothing is planted in the source


@pytest.mark.slow
@torch.inference_mode()
def test_smollm2s_down_proj_of_layer_11_stands_out():
    folder = catalog.model_path("smollm2-mtp")
    rows = json.loads((Path(__file__).parents[1] / "data" / "heldout_chat.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = chat_prompts(tokenizer, [{"prompt": row["prompt"]} for row in rows[:8]])
    layers = Layers(Target.open(folder), Weights(folder))
    tokens = [torch.tensor(ids) for ids in given]
    found = sensitivity(layers, tokens, by_layer(layers, matching(layers, "*.down_proj")))
    second, worst = sorted(found, key=lambda name: found[name]["outliers"])[-2:]
    print(worst, found[worst], second, found[second])
    assert worst == "model.layers.11.mlp.down_proj"
    assert found[worst]["outliers"] > 2 * found[second]["outliers"]


def score(kl: float) -> Score:
    return Score("any", 2 * kl, 1.0, 9, 10, kl, 5, [4, 3, 2, 1])


def test_a_cell_of_several_seeds_is_beside_its_control_text_by_text():
    """Twice and four times the control's KL on every text: three times it, without an interval."""
    minmax, gptq = chosen("int2 minmax")[0], chosen("int2 gptq")[0]
    kls = [0.1, 5.0, 1.0, 0.3]
    runs = [Scored(minmax, None, 7, 1.0, [score(kl) for kl in kls])]
    runs += [Scored(gptq, s, 7, 1.0, [score(f * kl) for kl in kls]) for s, f in ((0, 2), (1, 4))]
    control, row = figures(runs)
    assert row["reply_kl_to_minmax"]["value"] == pytest.approx(3)
    assert row["reply_kl_to_minmax"]["interval_95"] == pytest.approx([3, 3])
    low, high = row["reply_kl"]["interval_95"]
    assert 2 * low < high  # the control: not paired
    assert row["reply_kl_of_seeds"] == pytest.approx([2 * sum(kls) / 20, 4 * sum(kls) / 20])
    assert row["acceptance_length"]["value"] == control["acceptance_length"]["value"] == 2.5


@pytest.mark.slow
def test_shuffled_statistics_cost_more(nano):
    """Of nano-deepseek's experts at 2 bits, by each method that calibrates and by three seeds, on
    held-out replies as the grid of docs/which-method.md has them."""
    target = Target.open(nano)
    layers = Layers(target, Weights(nano))
    prompts = [DATA / "heldout_maths.json", DATA / "heldout_nano_chat.json"]
    judge = Judge(nano, replies_to(target, prompts, max_new_tokens=64, limit=40))

    def kl(cell, tokens, *shown_as) -> float:
        scores = judge.score(nano, solve(layers, cell, "*.experts.*", tokens, *shown_as)).scores
        return sum(s.reply_kl for s in scores) / sum(s.reply_positions for s in scores)

    for seed in range(3):
        tokens = [text.tokens for text in own_text(target, seed, 128)]
        for cell in chosen("int2 lwc,int2 gptq"):

            def shuffled(inputs, seed=seed):
                order = torch.Generator().manual_seed(seed)
                return inputs[:, torch.randperm(inputs.shape[1], generator=order)]

            found, misled = kl(cell, tokens), kl(cell, tokens, shuffled)
            print(cell.name, seed, found, misled)
            assert found < misled


@pytest.mark.slow
def test_rotation_costs_less_than_int4_inputs_as_they_are(nano):
    """Of nano-deepseek's experts; on some of the held-out replies of docs/which-method.md."""
    target = Target.open(nano)
    layers = Layers(target, Weights(nano))
    prompts = [DATA / "heldout_maths.json", DATA / "heldout_nano_chat.json"]
    judge = Judge(nano, replies_to(target, prompts, max_new_tokens=64, limit=40))
    found = {}
    for cell in chosen("int4 A4 *"):
        scores = judge.score(nano, solve(layers, cell, "*.experts.*", [])).scores
        found[cell.method] = sum(s.reply_kl for s in scores) / sum(
            s.reply_positions for s in scores
        )
    print(found)
    assert found["rotated"] < 0.8 * found["minmax"]
