"""Frozen parameters with Megatron-Core: their weights stay equal to the bit, and the gradients of the others do not change."""

import functools

import pytest

from tests.problems import refused
from tests.train import frozen, ranks
from tests.train.megatron.layouts import CP2, DP2, EP2, ONE, PP2, TP2_EP2_SP, TP2_PP2_SP, TP2_SP

BOTH, PLAIN = ({"recompute": True}, {}), ({},)
QUICK = {PP2: {"qwen2": PLAIN}}
FULL = {
    ONE: {"qwen2": BOTH, "qwen3_moe": BOTH, "deepseek_v3": PLAIN},
    TP2_SP: {"qwen2": BOTH, "qwen3_tied": PLAIN, "qwen3_moe": PLAIN},
    PP2: {"qwen2": BOTH, "qwen3_tied": BOTH, "llama": BOTH, "qwen3_moe": PLAIN, "deepseek_v3": PLAIN},
    CP2: {"qwen2": PLAIN},
    DP2: {"qwen2": PLAIN, "qwen3_moe": PLAIN},
    EP2: {"qwen3_moe": BOTH, "deepseek_v3": PLAIN},
    TP2_EP2_SP: {"qwen3_moe": PLAIN},
    TP2_PP2_SP: {"qwen2": PLAIN, "qwen3_moe": PLAIN},
}


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
def test_two_ranks(models, layout):
    ranks.run(functools.partial(frozen.families, QUICK[layout]), layout, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", FULL, ids=lambda layout: layout.name)
def test_every_layout(models, layout):
    ranks.run(functools.partial(frozen.families, FULL[layout]), layout, models)


@pytest.mark.parametrize(
    "family, pattern, code",
    [
        ("qwen2", "model.layers.2.*", "not-a-choice"),
        ("qwen2", "*.k_proj.*", "contradiction"),
        ("qwen2", "*.mlp.gate_proj.weight", "contradiction"),
        ("qwen3_moe", "*.experts.1.*", "contradiction"),
    ],
)
def test_refused_at_load(models, realm, family, pattern, code):
    with refused(("policy.freeze_parameters", code)):
        frozen.new(models, family, ONE, [pattern])


def test_a_checkpoint_does_not_load_with_other_frozen_parameters(models, realm, tmp_path):
    frozen.new(models, "qwen2", ONE, ["model.norm.*"]).shards().write(tmp_path, 0)
    with refused(("policy.freeze_parameters", "contradiction")):
        frozen.new(models, "qwen2", ONE, []).load(tmp_path)
