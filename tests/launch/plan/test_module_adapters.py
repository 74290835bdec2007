"""The plan of a refit of Megatron-Core's adapters, against what its ranks hold and engines receive."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig

from launch.plan.refit_layouts import rank_layouts
from pipeline import models
from pipeline.config import GenerationConfig, MegatronLoRAConfig, PolicyConfig, VLLMConfig
from pipeline.models.hugging_face import checkpoint_shapes
from pipeline.train.adapters.served_adapters import served_adapters
from pipeline.train.megatron.adapted_stage import adapt
from pipeline.train.megatron.groups import initialize
from pipeline.train.megatron.local_tensors import local_tensors
from pipeline.train.megatron.model import build
from pipeline.train.megatron.served_weights import ServedWeights
from tests.launch.plan.test_refit_layouts import Held, boxes, held, rank_of
from tests.models.cases import configs
from tests.problems import refused
from tests.train.megatron.layouts import Layout

OWN = ["linear_q", "linear_v", "linear_proj", "linear_fc1_up", "linear_fc2"]
ATTENTION = ["linear_qkv", "linear_proj"]
LATENT = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj", "*.shared_experts.*"]
ADAPTED = {"qwen2": [], "llama": OWN, "glm4": [], "gemma3_text": [], "qwen3_moe": ATTENTION, "deepseek_v3": LATENT}
ADAPTED |= {"nemotron_h_moe": ATTENTION, "qwen3_5_text": ATTENTION, "qwen3_5_moe_text": ATTENTION}
QUICK = [("llama", Layout(tp=2, sp=True)), ("qwen2", Layout(pp=2)), ("deepseek_v3", Layout(tp=2, ep=2, dp=2, sp=True))]
FULL = [
    *((family, Layout()) for family in ADAPTED),
    *((family, Layout(tp=2, dp=2, sp=True)) for family in ADAPTED),
    ("qwen3_moe", Layout(ep=2, dp=2)),
    ("qwen2", Layout(tp=2, cp=2, pp=2, sp=True)),
]


def policy(folder, family: str, layout: Layout) -> PolicyConfig:
    configs()[family].save_pretrained(folder)
    return PolicyConfig(
        model_name=str(folder),
        precision="float32",
        megatron_cfg=layout.megatron(peft=MegatronLoRAConfig(True, dim=3, target_modules=ADAPTED[family])),
        generation=GenerationConfig(temperature=1.0, vllm_cfg=VLLMConfig(2)),
    )


def served_boxes(policy: PolicyConfig) -> Held:
    """Return the boxes that this rank serves. Megatron-Core's groups must not exist."""
    config = AutoConfig.from_pretrained(policy.model_name)
    initialize(policy, seed=0)
    from megatron.core import parallel_state  # after pipeline.train.megatron, which prepares it for CPUs

    try:
        (shapes, _), family = checkpoint_shapes(config), models.family(config.model_type).parameters(config)
        stage = build(policy, config)
        adapters = adapt(stage, policy, family, shapes)
        assert adapters is not None
        local = local_tensors(stage, family | adapters.parameters, shapes | adapters.shapes)
    finally:
        parallel_state.destroy_model_parallel()
    base = {name: one for name, one in local.items() if name not in adapters.parameters}
    group, device = torch.distributed.group.WORLD, torch.device("cpu")
    assert group is not None
    return boxes(ServedWeights(local, base, shapes, adapters, True, group, device).layout())


@pytest.mark.parametrize(
    ("family", "layout"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)], ids=str
)
def test_the_plan_has_the_boxes_of_every_rank(family, layout, tmp_path):
    section = policy(tmp_path, family, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    found = rank_layouts(config, section, layout.ranks, 2, adapters=True)
    assert list(found.shapes.items()) == list(served_adapters(section).shapes.items())
    for rank in range(layout.ranks):
        with rank_of(rank, layout.ranks):
            assert held(found.train[rank], found.shapes) == served_boxes(section), rank
    entries = sum(map(math.prod, found.shapes.values()))
    for rank in (layout.ranks, layout.ranks + 1):  # whole on each rank of the engine
        assert found.generate[rank].units == ["adapters"]
        assert found.generate[rank].size.prod(axis=1).sum() == entries


def test_adapters_of_experts_are_refused(tmp_path):
    section = policy(tmp_path, "qwen3_moe", Layout())
    section.megatron_cfg.peft.target_modules = ["linear_fc2"]
    with refused(("policy.generation.lora_refit", "unsupported")):
        rank_layouts(configs()["qwen3_moe"].to_dict(), section, 1, 2, adapters=True)
