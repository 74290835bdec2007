"""Check expert parallelism: every layout gives Hugging Face's eager log-probs and gradients."""

import functools
from pathlib import Path

import pytest

from tests.train import experts, ranks
from tests.train.ranks import Layout

ALL = tuple(experts.configs())


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> Path:
    """Return a folder with one checkpoint per family."""
    folder = tmp_path_factory.mktemp("mixtures")
    experts.write_mixtures(folder)
    return folder


LAYOUTS = [
    pytest.param(Layout(2, 1), 2, ALL, id="ep2"),
    pytest.param(Layout(4, 1), 2, ALL, id="ep2dp2", marks=pytest.mark.full),
    pytest.param(Layout(4, 1), 4, ALL, id="ep4", marks=pytest.mark.full),
    pytest.param(Layout(1, 2), 1, ALL, id="tp2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2), 2, ("qwen3_moe", "mixtral"), id="tp2, ep2 over it", marks=pytest.mark.full),
    pytest.param(Layout(2, 2), 2, ALL, id="dp2tp2ep2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "expert", "families"), LAYOUTS)
def test_agrees_with_eager(layout, expert, families, mixtures):
    ranks.run(functools.partial(experts.against_eager, families, expert), layout, mixtures)
