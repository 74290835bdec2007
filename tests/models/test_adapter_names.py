"""Compare the layers that submission lets a recipe adapt with the linear layers and experts of transformers' models."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from launch.preflight import architecture
from pipeline.config import LoRAConfig
from pipeline.models.hugging_face import layout
from pipeline.train import lora
from pipeline.train.adapters.adapted_experts import expert_parameters
from tests.models.test_tensors import CASES, TINY
from tests.problems import named

KEY = "policy.dtensor_cfg.lora_cfg"


@pytest.mark.parametrize("case", CASES)
def test_every_linear_layer_can_be_named_and_no_other(case):
    kind, sizes = CASES[case]
    config = AutoConfig.for_model(kind, **{**TINY, **sizes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    linear = [name for name in linear if ".indexer." not in name]  # not run
    described_model = config.to_dict()
    layers = [*linear, *expert_parameters(model)]
    chosen = LoRAConfig(enabled=True, match_all_linear=False, target_modules=[*layers, *{n.split(".")[-1] for n in layers}])
    assert not list(architecture.adapter_problems(chosen, described_model))
    wrong = LoRAConfig(
        enabled=True,
        match_all_linear=False,
        target_modules=["wrong_proj", "*.any"],
        exclude_modules=["self_attn.no_proj", "lm_head"],
    )
    assert named(architecture.adapter_problems(wrong, described_model)) == {
        (f"{KEY}.target_modules", "not-a-choice"),
        (f"{KEY}.exclude_modules", "not-a-choice"),
    }
    assert not list(architecture.adapter_problems(LoRAConfig(enabled=True), described_model))


@pytest.mark.parametrize("case", CASES)
def test_adapters_that_engines_cannot_serve_are_named(case):
    kind, sizes = CASES[case]
    config = AutoConfig.for_model(kind, **{**TINY, **sizes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = expert_parameters(model)
    for names in ([], ["down_proj"], ["*.experts.*_proj"]):
        chosen = LoRAConfig(enabled=True, dim=2, match_all_linear=not names, target_modules=names)
        if names and not held:
            continue
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        adapters = lora.inject(model, chosen, layout(model))
        entries = {name: parameter.numel() for name, parameter in model.named_parameters() if ".experts.lora_" in name}
        problems = named(architecture.adapter_problems(chosen, config.to_dict(), served=True))
        folded = any(".kv_b_proj." in name for name in adapters.shapes)
        refused = {("policy.generation.lora_refit", "unsupported")} if entries or folded else set()
        assert problems == refused and bool(adapters.items)
