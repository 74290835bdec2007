"""Check which modules of Megatron-Core are used, and on which device. Needs no GPU."""

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.train.megatron import model
from pipeline.train.megatron.local_modules import PackedAttention

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
    twice = "megatron.core.tensor_parallel.gather_from_sequence_parallel_region"
    monkeypatch.setattr(twice, lambda mine, group: torch.cat([mine, mine]))  # its own buffers are on the process's device
    pair = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, attention_dropout=0.0)
    attention = PackedAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=pair))
    query, key, value = (torch.empty(12, heads, 4, device=META) for heads in (4, 2, 2))
    with Devices() as devices:
        out = attention._attend_over_ranks(query, key, value, (16, 8))
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
