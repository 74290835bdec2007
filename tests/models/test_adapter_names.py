"""Compare the layers that submission lets a recipe adapt with the linear layers of transformers' models."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from launch.preflight import adapter_names
from pipeline.config import LoRAConfig
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
    described = config.to_dict()
    chosen = LoRAConfig(enabled=True, match_all_linear=False, target_modules=[*linear, *{n.split(".")[-1] for n in linear}])
    assert not list(adapter_names.problems(chosen, described))
    wrong = LoRAConfig(
        enabled=True,
        match_all_linear=False,
        target_modules=["wrong_proj", "*.any"],
        exclude_modules=["self_attn.no_proj", "lm_head"],
    )
    assert named(adapter_names.problems(wrong, described)) == {
        (f"{KEY}.target_modules", "not-a-choice"),
        (f"{KEY}.exclude_modules", "not-a-choice"),
    }
    layers = named(adapter_names.problems(LoRAConfig(enabled=True), described))
    refused = {(f"{KEY}.match_all_linear", "unsupported")} if any(p.dim() > 2 for p in model.parameters()) else set()
    assert layers == refused
