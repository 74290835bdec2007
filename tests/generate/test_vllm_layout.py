"""The recorded layout and an update's result, value by value, against vLLM's own loaders on random tensors."""

import dataclasses
import functools

import pytest
import torch
from transformers import AutoConfig

from pipeline.boxes import Region, whole
from pipeline.generate.generate_backend import UpdateUnit
from pipeline.models.hugging_face import checkpoint_shapes
from tests.generate.families import EXPERTS, FAMILIES, LONG, SHORT, UNSTAGED, rank_model, save_config
from tests.generate.tiny import write

FAMILY = [*SHORT, *(pytest.param(family, marks=pytest.mark.long) for family in LONG)]
COMPUTED = {  # modules whose loaders compute: A = -exp(A_log)
    "falcon_h1": {"model.layers.0.mamba.mamba", "model.layers.1.mamba.mamba"},
    "granite_moe_hybrid": {"model.layers.0.mamba"},
    "jamba": {"model.layers.0.mamba"},
    "mamba": {"backbone.layers.0.mixer", "backbone.layers.1.mixer"},
    "mamba2": {"backbone.layers.0.mixer", "backbone.layers.1.mixer"},
    "nemotron_h": {"model.layers.0.mixer"},
    "zamba2": {"model.layers.0.mamba", "model.layers.1.mamba_decoder.mamba"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return family -> (folder, shapes on disk, tied copies).

    The shapes come first: where vLLM runs a transformers model, it changes that model's classes,
    which can then not be built without it.
    """

    @functools.cache
    def save(family):
        folder = tmp_path_factory.mktemp(family)
        save_config(family, folder)
        return folder, *checkpoint_shapes(AutoConfig.from_pretrained(folder))

    return save


def layouts(family):
    """(rank, arguments of rank_model)"""
    found = [(0, {}), (0, {"tensor": 2}), (1, {"tensor": 2})]
    if EXPERTS & FAMILIES[family][1].keys():
        found += [(rank, {"tensor": 2, "experts": True}) for rank in (0, 1)]
    if family not in UNSTAGED:
        found += [(rank, {"stages": 2}) for rank in (0, 1)]
    return found


def random_weights(shapes):
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) * 0.1 for name, shape in shapes.items()}


def check_by_value(model, units, weights):
    """Compare every raw parameter of every module that is not opaque, bit by bit; nothing else is written."""
    tensors = {f"{module}.{name}": tensor.data for module, layer in model.named_modules() for name, tensor in own(layer)}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    opaque = {module for unit in units.values() if unit.opaque for module in unit.modules}
    for tensor in tensors.values():
        tensor.zero_()
    model.load_weights(iter(weights.items()))
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    for unit in units.values():
        if unit.opaque:
            continue
        for fill in unit.fills:
            tensors[fill.tensor].as_strided(fill.size, fill.strides, fill.offset).fill_(fill.value)
        for region in unit.unit.regions:
            source = weights[region.name][region.box.within(whole(tuple(weights[region.name].shape)))]
            tensors[region.tensor].as_strided(region.box.size, region.strides, region.offset).copy_(source)
    for name, tensor in tensors.items():
        assert name.rpartition(".")[0] in opaque or torch.equal(tensor, expected[name]), name
    return opaque


def own(layer):
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


@pytest.mark.parametrize("family", FAMILY)
def test_regions_and_fills_equal_the_loaders_writes(family, saved):
    from pipeline.generate.vllm import record

    folder, shapes, _ = saved(family)
    assert len(layouts(family)) >= 3
    for rank, arguments in layouts(family):
        with rank_model(folder, rank, **arguments) as model:
            for tensor in model.parameters():
                tensor.data.fill_(0.5)
            before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
            units = record(model, shapes, torch.float32, complete=True)
            after = model.state_dict(keep_vars=True)
            assert all(after[name] is not None and id(after[name]) == old for name, (old, _) in before.items())
            assert all(torch.equal(after[name], old) for name, (_, old) in before.items())
            assert list(units) == [name for name, _ in model.named_modules() if name in units]
            opaque = check_by_value(model, units, random_weights(shapes))
            assert opaque <= COMPUTED.get(family, set())
            if not arguments:
                assert opaque == COMPUTED.get(family, set())


@pytest.mark.long
def test_a_parameter_that_the_loader_creates_is_refused(saved):
    from pipeline.generate.vllm import record

    folder, shapes, _ = saved("phi")
    with rank_model(folder, 0) as model, pytest.raises(ValueError, match=r"vLLM creates 'lm_head.bias' only"):
        record(model, shapes, torch.float32, complete=True)


@pytest.mark.parametrize("family", FAMILY)
def test_an_update_leaves_the_same_state_as_a_first_load(family, saved):
    """Compare every tensor of every module: parameters, buffers and plain attributes."""
    from pipeline.generate.vllm import VLLMUpdate, record  # before vLLM: it sets variables that vLLM reads on import

    from vllm.config import get_current_vllm_config  # isort: skip
    from vllm.model_executor.model_loader.utils import process_weights_after_loading  # isort: skip

    folder, shapes, tied = saved(family)
    weights = random_weights(shapes)

    def process(model):
        config = get_current_vllm_config()
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        return config

    with rank_model(folder, 0) as model, torch.no_grad():
        for tensor in model.parameters():
            tensor.data.fill_(0.5)
        config = process(model)
        units = record(model, shapes, torch.float32, complete=True)
        update = VLLMUpdate(model, config, shapes, tied, lambda: units, lambda version, recompute: None)
        write(update, [described.unit for described in units.values() if described.unit.regions], weights)
        update.commit(1)
        updated = state(model)
    with rank_model(folder, 0) as model, torch.no_grad():
        for tensor in model.parameters():
            tensor.data.zero_()
        model.load_weights(iter(weights.items()))
        process(model)
        loaded = state(model)
    assert updated.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(updated[name], tensor), name


def test_a_routers_bias_is_received_in_float32(saved):
    """Both where it is written in place and where a loader of vLLM gets it in full."""
    from pipeline.generate.vllm import VLLMUpdate, record

    from vllm.config import get_current_vllm_config  # isort: skip

    folder, shapes, tied = saved("deepseek_v3")
    gate = "model.layers.1.mlp.gate"
    bias = f"{gate}.e_score_correction_bias"
    everything = Region(bias, whole(shapes[bias]), bias, offset=0, strides=(1,))
    with rank_model(folder, 0, dtype="bfloat16") as model:
        described = record(model, shapes, torch.bfloat16, complete=True)[gate]
        assert not described.opaque and bias in {region.tensor for region in described.unit.regions}
        opaque = dataclasses.replace(described, opaque=True, unit=UpdateUnit(gate, (everything,)))
        for one in (described, opaque):
            units = {gate: one}
            update = VLLMUpdate(model, get_current_vllm_config(), shapes, tied, lambda u=units: u, lambda version, again: None)
            assert update.target(gate, bias).dtype == torch.float32
            update.give_up()


def state(model):
    found = {}
    for module, layer in model.named_modules():
        besides = [(name, value) for name, value in layer.__dict__.items() if isinstance(value, torch.Tensor)]
        found |= {f"{module}.{name}": tensor.detach().clone() for name, tensor in [*own(layer), *besides]}
    return found
