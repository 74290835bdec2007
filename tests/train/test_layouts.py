"""Check that every layout gives Hugging Face's eager log-probs and gradients, and resumes bitwise."""

import functools

import pytest

from tests.train import cases, ranks
from tests.train.ranks import Layout

DENSE = ("llama", "qwen3", "qwen3_tied")
OF_FOUR_RANKS = (
    Layout(1, 2, context=2, sequence=True),
    Layout(2, 1, context=2, replicas=2),
    Layout(1, 2, context=2),
    Layout(2, 2, replicas=2),
)
OTHERS_OF_FOUR_RANKS = (Layout(2, 2, replicas=2, sequence=True), Layout(1, 1, context=4), Layout(4, 1, replicas=2))
LAYOUTS = [
    pytest.param(Layout(2, 1), ("qwen3_moe",), id="dp2", marks=pytest.mark.full),  # by default: test_expert_parallel.py
    pytest.param(Layout(2, 1), cases.FAMILIES, id="dp2, all", marks=pytest.mark.full),
    # Norms of heads and tied embeddings; biases are in test_lora.py.
    pytest.param(Layout(1, 2), ("qwen3_tied",), id="tp2"),
    pytest.param(Layout(1, 2), ("llama", "qwen2", "qwen3"), id="tp2, others", marks=pytest.mark.full),
    pytest.param(Layout(1, 1, context=2), ("qwen3_tied",), id="cp2"),
    pytest.param(Layout(1, 2, sequence=True), ("qwen2", "qwen3_tied"), id="tp2-sp", marks=pytest.mark.full),
    *(pytest.param(layout, DENSE, id=layout.name, marks=pytest.mark.full) for layout in OF_FOUR_RANKS),
    *(pytest.param(layout, DENSE, id=layout.name, marks=pytest.mark.long) for layout in OTHERS_OF_FOUR_RANKS),
    pytest.param(Layout(2, 2), ("llama", "qwen2", "qwen3", "qwen3_tied"), id="dp2tp2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "families"), LAYOUTS)
def test_layout(layout, families, models, realm):
    ranks.run(functools.partial(ranks.some_families, families), layout, models)

    assert families
    # What those ranks saved goes on at another layout as it did at theirs: here, on one rank.
    for family in {"qwen3_tied", "qwen3_moe"} & set(families):
        trained = ranks.backend(cases.policy(models / family, scheduler=ranks.SCHEDULER))
        ranks.check_goes_on(trained, Layout(1, 1), models / ranks.saved_by(layout, family))
