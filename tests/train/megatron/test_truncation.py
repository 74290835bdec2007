"""Compare truncated log-probs in Megatron-Core's layouts with Hugging Face's eager models in float64."""

import functools

import pytest

from tests.train import ranks
from tests.train.megatron.layouts import CP2, ONE, PP2, TP2_SP
from tests.train.test_truncation import FAMILIES, check_backend


@pytest.mark.parametrize(
    ("layout", "families", "counts"),
    [
        (TP2_SP, ("qwen3_tied",), (2,)),
        *(pytest.param(layout, FAMILIES, (1, 2), marks=pytest.mark.full) for layout in (TP2_SP, CP2, PP2)),
    ],
    ids=str,
)
def test_layouts(models, layout, families, counts):
    ranks.run(functools.partial(check_backend, families, counts), layout, models)


def test_one_rank(models, realm):
    check_backend(FAMILIES, (1, 2), ONE, models)
