"""Compare the planned number of a rank's adapter parameters with the parameters of the backend's model."""

import dataclasses

import pytest

from launch.model_files import read_json
from launch.plan.memory_fsdp import FSDPMemory
from launch.plan.memory_parts import TrainModel
from launch.plan.parallelism import train_parallelism
from pipeline.config import RECIPES, LoRAConfig
from pipeline.models.hugging_face import layout, meta_model, model_config
from pipeline.models.shape import ModelShape
from pipeline.train import lora
from tests.launch.plan.memory_cases import BATCHES, FSDP, Case

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("model", "ranks", "expert"), [("tiny", 2, 1), ("tiny_moe", 1, 1), ("tiny_moe", 2, 1), ("tiny_moe", 2, 2)]
)
def test_adapters_of_a_rank(model, ranks, expert):
    layout_keys = (f"{FSDP}.enabled=true", f"{FSDP}.expert_parallel_size={expert}")
    overrides = (*BATCHES, *layout_keys, f"{FSDP}.lora_cfg.enabled=true")
    recipe = Case("adapters", model=model, ranks=ranks, overrides=overrides).load()
    shape = ModelShape.of(read_json(RECIPES / model / "config.json"))
    for names in ([], EVERY) if model == "tiny_moe" else ([],):
        config = LoRAConfig(True, dim=4, match_all_linear=not names, target_modules=names)
        dtensor = dataclasses.replace(recipe.policy.dtensor_cfg, lora_cfg=config)
        policy = dataclasses.replace(recipe.policy, dtensor_cfg=dtensor)
        planned = FSDPMemory(TrainModel(policy, shape), train_parallelism(policy, recipe.cluster.train), cuda=False)
        hf = meta_model(model_config(policy))
        lora.inject(hf, config, layout(hf))
        held = sum(parameter.numel() for name, parameter in hf.named_parameters() if ".lora_" in name)
        assert planned.adapters == held / ranks
