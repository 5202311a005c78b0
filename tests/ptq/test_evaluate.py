"""An evaluation's sums are those of transformers on decoded weights, its intervals the texts'."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from sglang_ascend.checkpoint import CheckpointError
from sglang_ascend.cli import app
from sglang_ascend.ptq.evaluate import Evaluated, Score, evaluate
from sglang_ascend.ptq.quantize import Quantization
from sglang_ascend.ptq.report import figures
from sglang_ascend.ptq.text import own_text
from sglang_ascend.quantization.checkpoint import Checkpoint
from sglang_ascend.quantization.recipe import read_recipe
from sglang_ascend.training.targets.families import Target
from sglang_ascend.training.targets.start import own_layer


@pytest.fixture(scope="module")
def w8a16(nano, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "w8a16"
    Quantization(nano, read_recipe("w8a16"), out).run()
    return out


@pytest.fixture(scope="module")
def texts(nano):
    return own_text(Target.open(nano), seed=5, count=6)


@pytest.fixture(scope="module")
def results(nano, w8a16, nano_w8a8, texts):
    return evaluate([w8a16, nano_w8a8], nano, texts)


def logits_of(target: Target, decoded: Checkpoint | None, tokens: torch.Tensor) -> torch.Tensor:
    """By transformers' whole model; its stacked experts are filled by hand."""
    model = target.load_model()
    state = model.state_dict()
    for module in decoded.schemes if decoded else ():
        values, parts = decoded.weight(module).dequantize(), module.split(".")
        if module.startswith("model.layers.4."):
            continue  # the MTP layer is no part of transformers' model
        if "experts" not in parts or "shared_experts" in parts:
            state[f"{module}.weight"].copy_(values)
            continue
        place, number, projection = ".".join(parts[:-2]), int(parts[-2]), parts[-1]
        if projection == "down_proj":
            state[f"{place}.down_proj"][number].copy_(values)
        else:
            half = len(values) * (projection == "up_proj")
            state[f"{place}.gate_up_proj"][number, half : half + len(values)].copy_(values)
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
    return model(tokens[None], attention_mask=mask).logits[0].double()


@torch.inference_mode()
def test_the_sums_are_those_of_transformers_on_decoded_weights(nano, w8a16, texts, results):
    """Over positions behind tokens that no earlier text begins with."""
    target, decoded = Target.open(nano), Checkpoint.open(w8a16)
    _, weight_only, integer = results
    for index in (0, 3):
        tokens, earlier = texts[index].tokens, [text.tokens for text in texts[:index]]
        is_new = torch.tensor(
            [
                not any(torch.equal(other[:n], tokens[:n]) for other in earlier)
                for n in range(1, len(tokens))
            ]
        )
        assert is_new.all() == (index == 0)
        p = logits_of(target, None, tokens)[:-1].log_softmax(-1)
        q = logits_of(target, decoded, tokens)[:-1].log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1)
        kl = divergence[is_new].sum().item()
        surprise = -q[torch.arange(len(q)), tokens[1:]][is_new].sum().item()
        found = weight_only.scores[index]
        assert found.kl == pytest.approx(kl, rel=0.02)
        predicts_reply = is_new & (torch.arange(len(q)) + 1 >= texts[index].prompt_length)
        assert found.reply_kl == pytest.approx(divergence[predicts_reply].sum().item(), rel=0.02)
        assert found.reply_positions == predicts_reply.sum()
        assert found.surprise == pytest.approx(surprise, rel=1e-4)
        assert found.agreed == (p.argmax(-1) == q.argmax(-1))[is_new].sum().item()
        assert found.positions == is_new.sum()
        other = integer.scores[index].kl  # the control: int8 inputs are another product
        assert other != pytest.approx(kl, rel=0.5)


def test_a_checkpoint_beside_itself_is_exactly_itself(results):
    reference = figures(results)["checkpoints"][0]["domains"]["all"]
    assert reference["kl"] == {"value": 0.0, "interval_95": [0.0, 0.0]}
    assert reference["perplexity_change"]["value"] == 0.0
    assert reference["top1_agreement"]["value"] == 1.0


@torch.inference_mode()
def test_every_slot_of_a_greedy_reply_counts_and_its_chain_is_drafted_one_by_one(
    nano, texts, results
):
    """The independent draft: the MTP layer rerun for each slot, fed its own tokens."""
    target = Target.open(nano)
    layer, (embedding, head) = own_layer(target), target.embedding_and_head()
    from sglang_ascend.ptq.layers import Layers
    from sglang_ascend.ptq.weights import Weights
    from sglang_ascend.training.interface import run_chain

    counts = torch.zeros(len(texts), 4, dtype=torch.long)
    for index, text in enumerate(texts):
        states = Layers(target, Weights(nano)).final_hidden([text.tokens])[0]
        for slot in range(text.prompt_length - 1, len(text.tokens) - 4):
            known = text.tokens[: slot + 2]
            kept = 0
            for step in range(1, 4):
                rows = states[None, : len(known) - 1]
                chain = run_chain(layer, rows, known[None], embedding, step)
                draft = (chain[-1][0, slot] @ head.T).argmax()
                if draft != text.tokens[slot + step + 1]:
                    break
                known = torch.cat([known, draft[None]])
                kept += 1
            counts[index, : kept + 1] += 1
    assert [score.accepted for score in results[0].scores] == counts.tolist()
    slots, _, _, whole = counts.sum(0)
    assert slots > whole > 0  # the control: not every chain is kept, nor none


def test_a_text_that_is_there_twice_counts_once(nano, nano_w8a8, texts):
    """Of the second one only its drafts are counted, which are as many as a reply has."""
    twice = evaluate([nano_w8a8], nano, [*texts[:2], texts[0]])[1]
    first = twice.scores[0]
    assert first.positions == len(texts[0].tokens) - 1
    again = twice.scores[2]
    assert (again.positions, again.kl, again.reply_positions, again.reply_kl) == (0, 0, 0, 0)
    assert again.accepted == first.accepted


def score(kl: float, positions: int, domain: str = "any") -> Score:
    return Score(domain, kl, 1.0, positions, positions, kl / 2, positions // 4, [4, 3, 2, 1])


def evaluated(scores) -> list[Evaluated]:
    reference = [replace(s, kl=0.0) for s in scores]
    return [Evaluated(Path("a"), reference, 100, 1.0), Evaluated(Path("b"), scores, 50, 1.0)]


def test_a_figure_is_a_ratio_of_sums_and_equal_texts_have_no_interval():
    report = figures(evaluated([score(1.0, 10), score(3.0, 30)]))["checkpoints"][1]
    assert report["of_reference_bytes"] == 0.5
    assert report["domains"]["all"]["kl"] == {"value": 0.1, "interval_95": [0.1, 0.1]}
    assert report["domains"]["all"]["acceptance_length"]["value"] == 2.5
    assert [kept["value"] for kept in report["domains"]["all"]["kept_drafts"]] == [0.75, 2 / 3, 0.5]


def test_a_ratio_to_the_last_is_paired():
    """Texts that differ a hundredfold, each three times as costly in one checkpoint as in the last:
    the ratio is three in every draw, although neither figure is known to a factor of two."""
    scores = [score(value, 10) for value in (0.1, 1.0, 10.0, 0.3)]
    last = [replace(s, kl=s.kl / 3, reply_kl=s.reply_kl / 5) for s in scores]
    three = [*evaluated(scores), Evaluated(Path("c"), last, 50, 1.0)]
    found = figures(three)["checkpoints"][1]["domains"]["all"]
    low, high = found["kl"]["interval_95"]
    assert low * 2 < high  # the control: not paired
    for name, ratio in (("kl_to_last", 3), ("reply_kl_to_last", 5)):
        assert found[name]["value"] == pytest.approx(ratio)
        assert found[name]["interval_95"] == pytest.approx([ratio, ratio])


@pytest.mark.slow
def test_a_bootstrap_interval_holds_the_true_mean_95_times_in_100():
    """400 experiments of 60 texts whose true mean is known; coverage has its own binomial noise."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        draws = torch.empty(60).exponential_(generator=generator).tolist()
        scores = [score(value * 10, 10) for value in draws]
        low, high = figures(evaluated(scores))["checkpoints"][1]["domains"]["any"]["kl"][
            "interval_95"
        ]
        held += low <= 1.0 <= high
    deviation = math.sqrt(400 * 0.95 * 0.05)
    # Bootstrap of a skewed mean covers a little less than it says.
    assert 380 - 5 * deviation < held < 380 + 4 * deviation


def test_another_vocabulary_is_refused(nano, with_mtp, texts):
    with pytest.raises(CheckpointError, match="has a vocabulary of 10 and"):
        evaluate([with_mtp], nano, texts[:1])


def test_the_command_prints_json_and_draws_a_plot(nano, nano_w8a8, tmp_path):
    prompts = tmp_path / "prompts.json"
    rows = [{"domain": "a & b", "prompt": "17 + 82 = ?"}, {"domain": "c", "prompt": "Is 5 > 3?"}]
    prompts.write_text(json.dumps(rows))
    options = [
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "8",
        "--svg",
        str(tmp_path / "kl.svg"),
    ]
    command = ["evaluate", str(nano_w8a8), "--against", str(nano), *options]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["checkpoints"][1]["domains"]) == ["all", "a & b", "c"]
    assert report["checkpoints"][1]["domains"]["all"]["kl"]["value"] > 0
    drawn = ElementTree.parse(tmp_path / "kl.svg").getroot()
    assert sum(child.tag.endswith("circle") for child in drawn) == 3

    missing = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--against", str(nano)])
    assert missing.exit_code == 2
    assert "config.json" in missing.stderr and missing.stderr.count("\n") == 1
