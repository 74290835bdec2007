"""Adapters that a refit reads of Megatron-Core's ranks equal those of an exported checkpoint, bit for bit, in every layout."""

import functools

import pytest

from pipeline.config import MegatronLoRAConfig
from pipeline.train.adapters.served_adapters import served_adapters
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.megatron import served_adapters as checks
from tests.train.megatron.layouts import CP2, EP2, ONE, PP2, TP2, TP2_EP2_SP, TP2_PP2_SP, TP2_SP

DENSE, MIXTURES = ("qwen2", "llama"), ("qwen3_moe", "deepseek_v3")
FULL = {TP2: ("llama",), TP2_SP: (*DENSE, *MIXTURES), PP2: (*DENSE, *MIXTURES), CP2: DENSE, EP2: MIXTURES, TP2_EP2_SP: MIXTURES}
FULL |= {TP2_PP2_SP: ("qwen2", *MIXTURES)}


def test_equal_the_export(models):
    ranks.run(functools.partial(checks.check_families, ("qwen2",)), TP2, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", FULL, ids=lambda layout: layout.name)
def test_equal_the_export_in_every_layout(models, layout):
    ranks.run(functools.partial(checks.check_families, FULL[layout]), layout, models)


def test_a_refit_keeps_the_adapters_on_the_device(models, realm):
    checks.check_offloaded(models / "qwen2", ONE)


@pytest.mark.parametrize(
    ("family", "names"), [("qwen3_moe", []), ("deepseek_v3", ["linear_kv_up_proj"]), ("gpt_oss", ["linear_qkv"])]
)
def test_adapters_that_engines_cannot_apply_are_refused(models, family, names):
    policy = cases.policy(models / family, megatron_cfg=ONE.megatron(peft=MegatronLoRAConfig(True, target_modules=names)))
    with refused(("policy.generation.lora_refit", "unsupported")):
        served_adapters(policy)
