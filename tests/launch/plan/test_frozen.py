"""The plan counts no gradient and no optimizer state for frozen parameters, on either backend and at every stage."""

import dataclasses

import pytest

from launch.plan.memory import stage_memories
from launch.plan.memory_parts import TrainModel
from launch.plan.rank_division import train_parallelism
from pipeline.config import ComponentConfig, DTensorConfig, MegatronConfig, PolicyConfig
from pipeline.models.frozen_names import matched
from pipeline.models.shape import ModelShape
from tests.models.cases import configs

CASES = [
    ("llama", ["model.layers.0.*"]),
    ("qwen2", ["model.embed_tokens.*", "*.self_attn.*"]),
    ("qwen3_moe", ["*.experts.*", "*.self_attn.*"]),
    ("qwen3_tied", ["model.embed_tokens.*"]),
]


def memories(family, patterns, ranks=1, **changes):
    shape = ModelShape.of(configs()[family].to_dict())
    policy = PolicyConfig(precision="bfloat16", freeze_parameters=patterns, **changes)
    layout = train_parallelism(policy, ComponentConfig(ranks_per_node=ranks))
    return shape, stage_memories(TrainModel(policy, shape), layout, False)


def count(shape, patterns):
    names = matched(patterns, [tensor.name for tensor in shape.tensors])
    return sum(tensor.numel for tensor in shape.tensors if tensor.name in names and tensor.part != "buffer")


@pytest.mark.parametrize("family, patterns", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp(family, patterns, ranks):
    shape, (whole,) = memories(family, [], ranks)
    _, (frozen,) = memories(family, patterns, ranks)
    number = count(shape, patterns) / ranks
    saved = {name: whole.resident[name] - frozen.resident[name] for name in whole.resident}
    expected = {"weights": 2 * number, "gradients": 4 * number, "optimizer": 8 * number}
    # Experts of an odd number are padded over ranks.
    assert saved == pytest.approx(expected, rel=0.35 if family == "qwen3_moe" and ranks > 1 else 1e-9)


@pytest.mark.parametrize("family, patterns", CASES)
@pytest.mark.parametrize("stages", [1, 2])
def test_megatron(family, patterns, stages):
    settings = MegatronConfig(enabled=True, pipeline_model_parallel_size=stages, freeze_moe_router=False)
    if stages > 1 and configs()[family].num_hidden_layers % 2:
        settings = dataclasses.replace(settings, num_layers_in_first_pipeline_stage=2)
    shape, whole = memories(family, [], stages, megatron_cfg=settings, dtensor_cfg=DTensorConfig(enabled=False))
    _, frozen = memories(family, patterns, stages, megatron_cfg=settings, dtensor_cfg=DTensorConfig(enabled=False))
    saved = [{n: a.resident[n] - b.resident[n] for n in a.resident} for a, b in zip(whole, frozen, strict=True)]
    number = count(shape, patterns)
    copies = stages if shape.tied else 1  # of the embedding
    assert sum(of["optimizer"] for of in saved) == pytest.approx(8 * number * copies)
    assert sum(of["weights"] for of in saved) == pytest.approx(4 * number * copies)  # of main weights in float32
