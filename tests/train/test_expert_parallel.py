"""Check expert parallelism: every layout gives Hugging Face's eager log-probs and gradients."""

import functools
from pathlib import Path

import pytest

from tests.train import experts, ranks
from tests.train.ranks import Layout

ALL = tuple(experts.configs())
CUT = ("qwen3_moe", "mixtral")  # whose attention tensor parallelism cuts


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> Path:
    """Return a folder with one checkpoint per family."""
    folder = tmp_path_factory.mktemp("mixtures")
    experts.write_mixtures(folder)
    return folder


LAYOUTS = [
    pytest.param(Layout(2, 1, expert=2), ALL, id="ep2"),
    pytest.param(Layout(4, 1, expert=2), ALL, id="dp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(4, 1, expert=4), ALL, id="ep4", marks=pytest.mark.long),
    pytest.param(Layout(1, 2), ALL, id="tp2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, expert=2), ALL, id="tp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, sequence=True, expert=2), CUT, id="sp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, sequence=True), CUT, id="sp2", marks=pytest.mark.full),
    pytest.param(Layout(2, 2, expert=2), ALL, id="dp2tp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 1, context=2, expert=2), ALL, id="cp2ep2", marks=pytest.mark.full),
    pytest.param(Layout(1, 2, context=2, expert=4), ALL, id="cp2tp2ep4", marks=pytest.mark.long),
    pytest.param(Layout(4, 1, replicas=2, expert=2), ALL, id="hsdp2ep2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "families"), LAYOUTS)
def test_agrees_with_eager(layout, families, mixtures):
    ranks.run(functools.partial(experts.against_eager, families), layout, mixtures)
