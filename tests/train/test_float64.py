"""Compute whole models in float64 with the code of FSDP2: what is left of their differences from eager models is rounding."""

import pytest

from tests.train import ranks
from tests.train.parity import references
from tests.train.parity.cells import Cell, measured

FAMILIES = ("llama", "qwen2", "gemma3_text", "mistral")
ROUNDED = 3e-7  # log-probs and summed gradients are given out in float32


@pytest.mark.full
def test_only_rounding_differs_from_eager(tmp_path):
    references.write(tmp_path, list(FAMILIES))
    found = measured(ranks.Layout(1, 1), [Cell(family, precision="float64") for family in FAMILIES], tmp_path)
    assert len(found) == len(FAMILIES)
    for cell, one in found.items():
        assert one.difference is not None and one.floor is not None, (cell, one)
        assert max(one.difference.logprob, one.difference.gradient) < ROUNDED < one.floor.logprob, (cell, one)
