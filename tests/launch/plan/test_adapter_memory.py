"""Compare the planned number of a rank's adapter parameters with the parameters of the backend's model."""

import dataclasses

import pytest

from launch.plan.memory import stage_memories
from launch.plan.memory_fsdp import FSDPMemory
from launch.plan.memory_parts import TrainModel, models
from launch.plan.rank_division import train_parallelism
from launch.recipes.model_files import read_json
from pipeline import config
from pipeline.config import RECIPES, LoRAConfig
from pipeline.models.hugging_face import layout, meta_model, model_config
from pipeline.models.shape import ModelShape
from pipeline.train import lora
from tests.launch.plan.memory_cases import BATCHES, FSDP, MEGATRON, Case

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("model", "ranks", "expert"), [("tiny", 2, 1), ("tiny_moe", 1, 1), ("tiny_moe", 2, 1), ("tiny_moe", 2, 2)]
)
def test_adapters_of_a_rank(model, ranks, expert):
    layout_keys = (f"{FSDP}.enabled=true", f"{FSDP}.expert_parallel_size={expert}")
    overrides = (*BATCHES, *layout_keys, f"{FSDP}.lora_cfg.enabled=true")
    recipe = Case("adapters", model=model, ranks=ranks, overrides=overrides).load()
    shape = ModelShape.of(read_json(RECIPES / model / "config.json"))
    for names in ([], EVERY, ATTENTION) if model == "tiny_moe" else ([], ATTENTION):
        lora_cfg = LoRAConfig(True, dim=4, match_all_linear=not names, target_modules=names)
        dtensor = dataclasses.replace(recipe.policy.dtensor_cfg, lora_cfg=lora_cfg)
        policy = dataclasses.replace(recipe.policy, dtensor_cfg=dtensor)
        planned = FSDPMemory(TrainModel(policy, shape), train_parallelism(policy, recipe.cluster.train), cuda=False)
        hf = meta_model(model_config(policy))
        adapted = {one.weight for one in lora.inject(hf, lora_cfg, layout(hf)).items}
        assert adapted
        numel = {name: parameter.numel() for name, parameter in hf.named_parameters()}
        assert planned.resident["merged weights"] == 4 * sum(numel[name] for name in adapted) / ranks
        if names != ATTENTION:  # the plan counts adapters of all linear layers
            assert planned.adapters == sum(numel[name] for name in numel if ".lora_" in name) / ranks


@pytest.mark.parametrize("adapters", [f"{FSDP}.lora_cfg", f"{MEGATRON}.peft"])
def test_merged_weights_are_counted_only_where_something_reads_them(adapters):
    """They are read by a refit of whole weights and by an export at the run's end."""

    def counted(recipe: str, *overrides: str) -> bool:
        enabled = (f"{adapters.rpartition('.')[0]}.enabled=true", f"{adapters}.enabled=true")
        loaded = config.load(str(RECIPES / f"{recipe}.yaml"), [*enabled, *overrides])
        shape = ModelShape.of(read_json(RECIPES / "tiny/config.json"))
        (policy,) = models(loaded, {"policy": shape})
        (memory,) = stage_memories(policy, train_parallelism(loaded.policy, loaded.cluster.train), False)
        return "merged weights" in memory.resident

    saved, unsaved = (f"checkpointing.save_consolidated={value}" for value in ("true", "false"))
    assert counted("tiny_grpo", unsaved)
    assert not counted("tiny_grpo", unsaved, "policy.generation.lora_refit=adapter")
    assert counted("tiny_grpo", saved, "policy.generation.lora_refit=adapter")
    assert counted("tiny_sft", saved) and not counted("tiny_sft", unsaved)


@pytest.mark.parametrize(
    ("chosen", "experts"),
    [
        ("target_modules=[]", True),
        ("target_modules=[linear_fc2]", True),
        ("target_modules=[linear_qkv,linear_proj]", False),
        ("exclude_modules=['*.local_experts.*']", False),
    ],
)
def test_experts_of_megatron_core_without_adapters_are_not_counted(chosen, experts):
    overrides = [f"{MEGATRON}.enabled=true", f"{MEGATRON}.peft.enabled=true", f"{MEGATRON}.peft.{chosen}"]
    recipe = Case("adapters", model="tiny_moe", ranks=1, overrides=(*BATCHES, *overrides)).load()
    shape = ModelShape.of(read_json(RECIPES / "tiny_moe/config.json"))
    (memory,) = stage_memories(TrainModel(recipe.policy, shape), train_parallelism(recipe.policy, recipe.cluster.train), False)
    merged = (shape.parameters - (0 if experts else shape.routed)) * 4
    assert memory.resident["merged weights"] == merged
