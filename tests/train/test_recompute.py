"""Check what the backward pass recomputes, by its operators and by the bytes that are kept."""

from collections import Counter

import pytest
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.train.recompute import GROUPED, KEPT
from tests.train import cases, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def backward(model, **settings) -> tuple[Counter, int]:
    """Return (how often the backward pass ran each operator, bytes that the forward pass saved for it)."""
    trained = ranks.backend(cases.policy(model), Layout(1, 1), **settings)
    batch = cases.pack(list(range(len(cases.LENGTHS))))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        outputs = trained._outputs(batch, trained._model)
    left = sum(event.self_cpu_memory_usage for event in memory.key_averages())
    with Operators() as operators:
        cases.loss(outputs, batch).loss.backward()
    return operators.seen, left


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_selective_recomputation_repeats_no_product_and_no_attention(models, family):
    model = models / family
    nothing, most = backward(model)
    everything, least = backward(model, activation_checkpointing=True)
    selected, between = backward(model, activation_checkpointing=True, recompute_granularity="selective")
    kept = (KEPT | GROUPED) & everything.keys()
    assert any("attention" in name for name in kept) and any("mm" in name for name in kept)
    assert all(everything[name] > nothing[name] for name in kept)
    assert {name: selected[name] for name in kept} == {name: nothing[name] for name in kept}
    assert selected["aten::silu"] == everything["aten::silu"] > nothing["aten::silu"]
    assert least < between < 0.75 * most
