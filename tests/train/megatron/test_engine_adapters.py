"""Check adapters of layers with TransformerEngine's attributes, which differ from those of Megatron-Core's. Needs no GPU."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.models.decoder import identity
from pipeline.models.family import Parameter
from pipeline.train.adapters.linear import AdapterSwitch
from pipeline.train.adapters.modules import AdaptedModule
from pipeline.train.adapters.spec import AdapterSpec
from pipeline.train.megatron import adapters

TARGET = AdaptedModule("layer", Parameter(("w.weight",), identity, "rows"), ("shared",))


class EngineLinear(torch.nn.Linear):
    """A linear layer with the attributes of TransformerEngine's: an empty bias for none, and no `skip_bias_add`."""

    def __init__(self, biased: bool):
        super().__init__(4, 6, bias=biased)
        if not biased:
            del self.bias
            self.bias = torch.Tensor()
        self.config = SimpleNamespace(sequence_parallel=True)
        self.parallel_mode = None


def adapter(monkeypatch, layer: EngineLinear, ranks: int, dora: bool = False) -> adapters.ModuleAdapter:
    monkeypatch.setattr(adapters, "tensor_group", lambda: SimpleNamespace(size=lambda: ranks, rank=lambda: 0))
    spec = AdapterSpec(2, 4.0, "xavier", dora, rslora=False, dropout=0.0, dropout_input=False)
    found = adapters.ModuleAdapter(layer, TARGET, (6,), spec, AdapterSwitch())
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found


@pytest.mark.parametrize("bias", ["none", "added", "returned"])
def test_dora_with_a_bias_that_is_empty_or_returned_apart(monkeypatch, bias):
    torch.manual_seed(0)
    layer = EngineLinear(bias != "none")
    dora, inputs = adapter(monkeypatch, layer, ranks=1, dora=True), torch.randn(3, 4)
    product = inputs @ layer.weight.T
    output = product + layer.bias if bias == "added" else product
    expected = inputs @ dora.merged(layer).T
    found = dora(layer, inputs, output, bias != "returned")
    torch.testing.assert_close(found, expected + layer.bias if bias == "added" else expected)


def test_a_layer_that_is_whole_on_every_rank_has_partial_gradients_under_sequence_parallelism(monkeypatch):
    whole = adapter(monkeypatch, EngineLinear(False), ranks=2)
    assert whole.partial == [whole.lora_A, whole.lora_B]
