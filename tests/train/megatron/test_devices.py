"""Check which modules of Megatron-Core are used, and on which device. Needs no GPU."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.train import attention
from pipeline.train.megatron import model
from pipeline.train.sequence_bounds import Packing

META = torch.device("meta")


class Devices(TorchDispatchMode):
    """Records the devices of all computations."""

    def __init__(self):
        super().__init__()
        self.seen: set[torch.device] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen |= {leaf.device for leaf in tree_leaves(result) if torch.is_tensor(leaf)}
        return result


def test_context_parallel_attention_computes_nothing_on_the_host(monkeypatch):
    """Check the second of two ranks."""
    monkeypatch.setattr(attention.GatherRows, "apply", lambda mine, group: torch.cat([mine, mine]))
    pair = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    starts = torch.empty(3, device=META, dtype=torch.int32)
    packing = Packing.of_lengths((16, 8), starts, pair)
    query, key, value = (torch.empty(12, heads, 4, device=META) for heads in (4, 2, 2))
    with Devices() as devices:
        out = attention.attend(query, key, value, packing, attention.AttentionKind())
    assert out.shape == (12, 4, 4)
    assert devices.seen == {META}


@pytest.mark.parametrize("known", [True, False])
def test_transformer_engine_is_used_if_megatron_core_uses_it(monkeypatch, known):
    """A version that imports, but lacks what Megatron-Core imports from it, counts as missing."""
    engine = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    for name, module in engine.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "HAVE_TE", known)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert model.transformer_engine() == known
    assert ["cannot be imported" in str(warning.message) for warning in told] == ([] if known else [True])
