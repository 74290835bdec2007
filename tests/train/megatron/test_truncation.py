"""Truncated log-probs in Megatron-Core's layouts, against Hugging Face's eager models in float64."""

from pathlib import Path

import pytest

from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, ONE, PP2, TP2_SP, Layout
from tests.train.test_truncation import FAMILIES, GENERATION, USE, check_step, eager


def check(layout: Layout, folder: Path) -> None:
    for family in FAMILIES:
        expected, gradients = eager(folder / family)
        for count in (1, 2):
            trained = layouts.backend(cases.policy(folder / family, generation=GENERATION), layout, USE)
            check_step(trained, layouts.shares(layout, count)[trained.data_rank], expected)
            ours, _ = layouts.gradients(trained)
            ranks.assert_near(ours, gradients, 5e-6)


@pytest.mark.parametrize("layout", [TP2_SP, CP2, PP2], ids=lambda layout: layout.name)
def test_layouts(models, layout):
    layouts.run(check, layout, models)


def test_one_rank(models, realm):
    check(ONE, models)
