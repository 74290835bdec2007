"""The plan counts every teacher: in host memory, or all of them on the GPU, and one forward pass for each."""

import pytest

from launch.plan import memory
from launch.recipes.model_files import read_json
from pipeline import config
from pipeline.config import RECIPES, Recipe
from pipeline.models.shape import ModelShape

SECTION = "on_policy_distillation.teachers"


def load(*overrides: str) -> Recipe:
    models = [f"{SECTION}.{name}.model_name={RECIPES / 'tiny'}" for name in ("short", "long")]
    own = (f"{SECTION}.long.precision=bfloat16", "cluster.train.gpus_per_node=2", "policy.dtensor_cfg.enabled=true")
    return config.load("tiny_teachers", [f"policy.model_name={RECIPES / 'tiny'}", *models, *own, *overrides])


def planned(recipe: Recipe) -> memory.TrainMemory:
    shape = ModelShape.of(read_json(RECIPES / "tiny/config.json"), "policy.model_name")
    return memory.train(recipe, dict.fromkeys(config.models(recipe), shape))


def test_offloaded_teachers_are_in_host_memory_and_others_on_the_gpu() -> None:
    weights = 754_816 * (4 + 2) / 2  # one in float32, one in bfloat16, over two ranks
    offloaded = planned(load())
    assert offloaded.host == pytest.approx(weights, rel=0.05)
    assert "other models" not in offloaded.parts
    resident = planned(load(*(f"{SECTION}.{name}.cpu_offload=false" for name in ("short", "long"))))
    assert resident.host == 0
    assert resident.parts["other models"] == pytest.approx(weights, rel=0.05)
