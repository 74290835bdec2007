"""Compare truncated log-probs in Megatron-Core's layouts with Hugging Face's eager models in float64."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, ONE, PP2, TP2_SP, Layout
from tests.train.test_truncation import FAMILIES, GENERATION, ROLE, check_step, eager


def check(layout: Layout, folder: Path) -> None:
    """Check every family, in one microbatch and in two."""
    check_some(FAMILIES, (1, 2), layout, folder)


def check_some(families: Sequence[str], counts: Sequence[int], layout: Layout, folder: Path) -> None:
    for family in families:
        expected, gradients = eager(folder / family)
        for count in counts:
            trained = layouts.backend(cases.policy(folder / family, generation=GENERATION), layout, ROLE)
            check_step(trained, layouts.shares(layout, count)[trained.data_rank], expected)
            ours, _ = layouts.gradients(trained)
            ranks.assert_near(ours, gradients, 5e-6)


@pytest.mark.parametrize(
    ("layout", "family"),
    [(TP2_SP, "qwen3_tied"), *(pytest.param(*one, marks=pytest.mark.full) for one in ((CP2, "llama"), (PP2, "qwen3_tied")))],
    ids=lambda case: getattr(case, "name", case),
)
def test_layouts(models, layout, family):
    layouts.run(functools.partial(check_some, (family,), (2,)), layout, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", [TP2_SP, CP2, PP2], ids=lambda layout: layout.name)
def test_layouts_with_every_family(models, layout):
    layouts.run(check, layout, models)


def test_one_rank(models, realm):
    check(ONE, models)
