"""Updates shard by shard, on real engines of one rank."""

import pytest
import torch

from pipeline.types import VersionSpan
from tests.generate.tiny import drain, refit, requests, write


@pytest.fixture(autouse=True)
def own_groups():
    """vLLM keeps its groups per process; those of an earlier test's dense model lack the groups of an MoE model."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


def test_the_layout_covers_the_checkpoint_once(new_engine, checkpoint):
    engine = new_engine("vllm", "qwen3_moe")
    covered = {}
    for unit in engine.layout():
        for region in unit.regions:
            covered.setdefault(region.name, torch.zeros(engine.shapes[region.name], dtype=torch.int8))
            covered[region.name][tuple(slice(o, o + s) for o, s in zip(region.box.offset, region.box.size, strict=True))] += 1
    assert covered.keys() == checkpoint("qwen3_moe", 0).weights().keys()
    assert all((count == 1).all() for count in covered.values())
    tensors = [(unit.name, region.tensor) for unit in engine.layout() for region in unit.regions]
    assert len({unit for unit, _ in tensors}) == len(engine.layout())
    assert len({tensor for _, tensor in tensors}) == len(set(tensors))
    update = engine.update()
    in_place = {unit.name for unit in engine.layout() if update.in_place(unit.name)}
    assert "model.embed_tokens" in in_place and "model.layers.0.input_layernorm" in in_place
    assert "model.layers.0.self_attn.qkv_proj" not in in_place  # on CPU vLLM packs it
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_an_abandoned_update_is_repaired_by_the_next(family, new_engine, checkpoint):
    engine, drawn = new_engine("vllm", family), requests(4, 1, temperature=0.0)
    live = storage(engine)
    new, units = checkpoint(family, 1).weights(), engine.layout()
    half = len(units) // 2

    update = engine.update()
    write(update, units[:half], new)
    update.target(units[half].name, units[half].regions[0].tensor)  # open, and never finished
    with pytest.raises(RuntimeError, match="are not finished; one is"):
        update.commit(1)
    with pytest.raises(RuntimeError, match="is already finished in this update"):
        update.target(units[0].name, units[0].regions[0].tensor)
    with pytest.raises(RuntimeError, match="commit an update first"):
        engine.add(drawn)

    update = engine.update()  # a failure of its own: processing raises
    packed = next(unit for unit in units if not update.in_place(unit.name))
    layer = dict(engine._model.named_modules())[packed.name]
    update.target(packed.name, packed.regions[0].tensor)
    method, layer.quant_method = layer.quant_method, replace_processing(layer.quant_method)
    with pytest.raises(MemoryError, match="while packing"):
        update.finish(packed.name)
    layer.quant_method = method
    assert storage(engine) == live

    refit(engine, new, version=2)
    assert storage(engine) == live
    for id, completion in drain(engine, drawn).items():
        request = next(r for r in drawn if r.id == id)
        assert completion.tokens.tolist() == checkpoint(family, 1).greedy(request.tokens, 24)
        assert completion.spans == (VersionSpan(2, len(completion.tokens)),)
    engine.close()


def storage(engine):
    """Return the addresses of the model's parameters."""
    return {name: parameter.data_ptr() for name, parameter in engine._model.named_parameters()}


def replace_processing(method):
    def fail(layer):
        raise MemoryError("while packing")

    class Failing(type(method)):
        process_weights_after_loading = staticmethod(fail)

    failing = object.__new__(Failing)
    failing.__dict__ = method.__dict__
    return failing
