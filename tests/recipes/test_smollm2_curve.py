"""The plot of docs/measurements.md is that of the committed layer and of those it began from."""

import json
from pathlib import Path

from recipes.smollm2_mtp.curve import draw, layers_of
from sglang_ascend.models.smollm2 import ARTIFACT

PLOT = Path(__file__).parents[2] / "docs" / "smollm2-tokens.svg"


def test_the_page_shows_the_committed_layer():
    provenance = json.loads((ARTIFACT / "provenance.json").read_text())
    layers = layers_of(provenance)
    assert PLOT.read_text() == draw(layers)
    tokens = [layer.num_tokens for layer in layers]
    assert tokens == sorted(tokens) and len(tokens) > 2
    reached = provenance["acceptance_full_vocabulary"]["all"]
    assert layers[-1].acceptance_length == reached["acceptance_length"]
