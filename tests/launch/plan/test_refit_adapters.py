"""The plan of a refit of adapters, against the backend's own layout."""

import dataclasses

import pytest

from launch.plan.refit_layouts import rank_layouts
from pipeline.config import LoRAConfig
from pipeline.train.adapters.served_adapters import served_adapters
from tests.generate.tiny import CONFIGS, policy
from tests.generate.tiny import save as save_model

SECTIONS = {
    "all": LoRAConfig(True, dim=4),
    "some": LoRAConfig(
        True, dim=2, match_all_linear=False, target_modules=["q_proj", "mlp.up_proj"], exclude_modules=["up_proj"]
    ),
}


@pytest.mark.parametrize("case", SECTIONS)
def test_the_plan_sends_the_adapters_that_the_policy_has(case, tmp_path):
    save_model(tmp_path, "llama", 0)
    section = policy(tmp_path, "vllm")
    section.dtensor_cfg = dataclasses.replace(section.dtensor_cfg, lora_cfg=SECTIONS[case], tensor_parallel_size=2)
    section.generation.vllm_cfg.tensor_parallel_size = 2
    found = rank_layouts(CONFIGS["llama"].to_dict(), section, train=4, generate=2, adapters=True)
    assert found.shapes == served_adapters(section).shapes
    for rank in (4, 5):  # whole on each rank of the engine
        assert found.generate[rank].units == ["adapters"]
        assert len(found.generate[rank].tensor) == len(found.shapes)
    entries = sum(size[0] * size[1] for rank in range(4) for size in found.train[rank].size.tolist())
    cut = sum(shape[0] * shape[1] for shape in found.shapes.values())
    assert cut < entries < 2 * cut  # tensor-parallel ranks share what they hold whole
