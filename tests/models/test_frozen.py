"""`freeze_parameters`: the parameters that patterns freeze together, known before submission, are those of the backends."""

import pytest

from launch.preflight.architecture import frozen_problems as problems
from pipeline import models
from pipeline.config import MegatronConfig, PolicyConfig
from pipeline.models.config_values import MULTIMODAL
from pipeline.models.family import CONSTANTS
from pipeline.models.frozen_names import grouped, known_groups, matched
from pipeline.models.hugging_face import layout, meta_model
from tests.models.cases import configs
from tests.problems import named
from tests.train import multimodal

CONFIGS = configs()
HEADS = [
    *((family, "logprobs") for family in CONFIGS),
    *((family, "values") for family in ("llama", "qwen3_tied", "qwen3_moe", "gpt_oss")),
]


@pytest.mark.parametrize("family, head", HEADS)
def test_the_groups_of_every_family_are_those_in_memory(family, head):
    config = CONFIGS[family]
    plain, values = config.to_dict(), head == "values"
    hf = meta_model(config, head)
    trained = {name for name, _ in hf.named_parameters()}
    in_memory = {frozenset(piece.name for piece in pieces) for name, pieces in layout(hf).items() if name in trained}
    assert set(map(frozenset, known_groups(plain, False, values).values())) == in_memory
    described = models.family(config.model_type).parameters(config, head)
    fused = grouped({name: one.sources for name, one in described.items() if not name.endswith(CONSTANTS)})
    found = set(map(frozenset, known_groups(plain, True, values).values()))
    assert found == set(map(frozenset, fused.values()))
    assert set().union(*found) == set().union(*in_memory)


def test_patterns_match_whole_names():
    names = ["model.layers.1.mlp.w", "model.layers.11.mlp.w", "model.norm.w"]
    assert matched(["model.layers.1.*"], names) == {names[0]}
    assert matched(["layers.1.*"], names) == set()
    assert matched(["*.w"], names) == set(names)
    assert matched(["model.layers.1[0-9].*", "*norm.w"], names) == {names[1], names[2]}
    assert matched([], names) == set()


CHECKED = [
    ("qwen2", ["model.embed_tokens.*", "model.layers.0.*"], set(), set()),
    ("qwen2", ["*.k_proj.*"], set(), {"contradiction"}),
    ("qwen2", ["*.gate_proj.*"], set(), {"contradiction"}),
    ("qwen2", ["*.layer.0.*", "*.norm.weight"], {"not-a-choice"}, {"not-a-choice"}),
    ("qwen2", ["*"], {"contradiction"}, {"contradiction"}),
    ("qwen3_moe", ["*.experts.*"], set(), set()),
    ("qwen3_moe", ["*.experts.0.*"], {"contradiction"}, {"contradiction"}),
    ("qwen3_moe", ["*.experts.*.down_proj.*"], set(), set()),
    ("qwen3_tied", ["lm_head.*"], {"not-a-choice"}, {"not-a-choice"}),
    ("deepseek_v3", ["*.e_score_correction_bias"], {"not-a-choice"}, {"not-a-choice"}),
]


@pytest.mark.parametrize("family, patterns, fsdp, megatron", CHECKED)
def test_patterns_are_checked_before_submission(family, patterns, fsdp, megatron):
    plain = CONFIGS[family].to_dict()
    for enabled, expected in ((False, fsdp), (True, megatron)):
        policy = PolicyConfig(freeze_parameters=patterns, megatron_cfg=MegatronConfig(enabled=enabled))
        found = named(problems("policy", policy, plain, values=False))
        assert found == {("policy.freeze_parameters", code) for code in expected}


def test_a_reward_model_has_a_head_of_its_own():
    plain = CONFIGS["llama"].to_dict()
    for pattern, codes in (("score.weight", set()), ("lm_head.weight", {"not-a-choice"})):
        found = named(problems("policy", PolicyConfig(freeze_parameters=[pattern]), plain, values=True))
        assert found == {("policy.freeze_parameters", code) for code in codes}


@pytest.mark.parametrize(
    "family, patterns, some",
    [
        ("qwen3_moe", ["*.mlp.gate.*"], ["model.layers.0.mlp.gate.*"]),
        ("gpt_oss", ["*.mlp.router.*"], ["*.0.mlp.router.*"]),
        ("nemotron_h_moe", ["*.mixer.gate.weight"], ["backbone.layers.1.*"]),
        ("deepseek_v3", ["*.mlp.*"], ["model.embed_tokens.*", "*.experts.*"]),
        ("qwen3_5_moe_text", ["model.language_model.layers.*"], ["model.language_model.layers.0.*"]),
    ],
)
def test_frozen_routers_balance_no_load(family, patterns, some):
    plain, key = CONFIGS[family].to_dict(), ("policy.moe_aux_loss_coeff", "contradiction")
    if "language_model" in patterns[0]:
        plain[MULTIMODAL] = multimodal.config(CONFIGS[family]).to_dict()
    for given, expected in ((patterns, {key}), (some, set())):
        policy = PolicyConfig(freeze_parameters=given, moe_aux_loss_coeff=0.001)
        assert named(problems("policy", policy, plain, values=False)) == expected
