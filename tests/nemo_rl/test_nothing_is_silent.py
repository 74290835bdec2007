"""Every leaf is accounted for: one that is added anywhere is a problem, and a feature is one by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import pytest

from launch.recipes import nemo_rl
from pipeline.recipe.values import leaves
from tests.nemo_rl.__main__ import resolved
from tests.nemo_rl.census import QUESTIONS, TRANSLATED, dropped, features
from tests.nemo_rl.test_translation import RECIPES, inspect, with_keys
from tests.problems import named

NAMES = ("grpo", "grpo_megatron", "ppo", "sft", "distillation")

# Sections that pass to a library as they are, or that mean nothing here whatever is in them.
OPEN = (
    "*.hf_config_overrides",
    "*.vllm_kwargs",
    "*.env_vars",
    "*.model_overrides",
    "*.chat_template_kwargs",
    "policy.optimizer.kwargs",
    "*.mcore_generation_config",
    "*.automodel_kwargs.backend",
    "logger.wandb",
    "logger.gpu_monitoring",
    "data_plane",
    "env.unused",
    "teacher.optimizer*",
    "value.megatron_cfg.checkpoint",
    "policy.megatron_cfg.checkpoint",
)


def sections(tree: Mapping[str, Any], key: str = "") -> Iterator[str]:
    """Return all mappings except those that are off, or open."""
    yield key
    for name, value in tree.items():
        below = f"{key}.{name}" if key else name
        if isinstance(value, Mapping) and value.get("enabled") is not False and not any(fnmatchcase(below, o) for o in OPEN):
            yield from sections(value, below)


CASES = [(name, key) for name in NAMES for key in sections(resolved(RECIPES / f"{name}.yaml"))]


@pytest.mark.parametrize(("name", "section"), CASES)
def test_an_unknown_key_is_a_problem(name: str, section: str) -> None:
    path = RECIPES / f"{name}.yaml"
    tree = deepcopy(resolved(path))
    inner: Any = tree
    for part in filter(None, section.split(".")):
        inner = inner[part]
    inner["no_such_key"] = 1
    key = f"{section}.no_such_key".lstrip(".")
    translation = nemo_rl.translate(tree, {}, path)
    passed_on = dict(leaves(translation.layer))  # our own reader knows its keys
    assert (key, "unknown-key") in named(translation.problems) or key in passed_on


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_are_passed_on_are_known(name: str) -> None:
    assert inspect(name).problems == []


def test_an_unknown_key_suggests_the_nearest() -> None:
    (problem,) = with_keys("grpo", "loss_fn.ratio_clip_maxx=0.2")[1].problems
    assert (problem.key, problem.code) == ("loss_fn.ratio_clip_maxx", "unknown-key")
    assert "did you mean 'loss_fn.ratio_clip_max'" in problem.message


ASKING = {
    "generation backend": ("grpo", "policy.generation.backend=hal"),
    "FP8 training": ("grpo_megatron", "policy.megatron_cfg.fp8_cfg.enabled=true"),
    "MXFP8 generation": ("grpo", "policy.generation.vllm_cfg.precision=fp8", "policy.generation.vllm_cfg.is_mx=true"),
    "FP8 cache": ("grpo", "policy.generation.vllm_cfg.kv_cache_dtype=fp8"),
    "draft": ("grpo", "policy.draft.enabled=true"),
    "quantization": ("grpo", "policy.quant_cfg=NVFP4_DEFAULT_CFG"),
    "MTP": ("grpo_megatron", "policy.megatron_cfg.mtp_num_layers=1"),
    "virtual pipeline": ("grpo_megatron", "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2"),
    "another optimizer": ("grpo", "policy.optimizer.name=dion.Dion"),
    "frozen language model": (
        "grpo",
        "policy.dtensor_cfg.automodel_kwargs.freeze_config={freeze_vision_tower: false, freeze_language_model: true}",
    ),
    "NeMo Gym": ("grpo", "env.should_use_nemo_gym=true"),
    "custom data loader": ("grpo", "data.use_multiple_dataloader=true"),
    "teachers with other tokenizers": ("distillation", "teachers=[{model_name: Qwen/Qwen3-4B}]"),
    "positive NLL": ("grpo", "loss_fn.positive_example_nll_weight=0.1"),
    "words never sampled": ("grpo", "policy.generation.bad_words=[stop]"),
}


KEEPING = {
    "router replay": ("grpo", "policy.router_replay.enabled=true"),
    "load balancing": (
        "grpo_megatron",
        "policy.model_name=Qwen/Qwen3-30B-A3B",
        "policy.megatron_cfg.expert_model_parallel_size=2",
        "policy.megatron_cfg.moe_router_load_balancing_type=aux_loss",
    ),
    "async PPO": ("ppo", "ppo.async_ppo.enabled=true", "ppo.async_ppo.in_flight_weight_updates=true"),
    "single controller": ("grpo", "grpo.async_grpo=null", "async_rl={sampler: {name: windowed, max_staleness_versions: 2}}"),
    "several teachers": (
        "grpo",
        "grpo.adv_estimator.name=opd",
        "on_policy_distillation={enabled: true, teacher_model_by_agent_name: {math: Qwen/Qwen3-8B, code: Qwen/Qwen3-4B}}",
    ),
    "several rewards": ("grpo", "grpo.adv_estimator.name=gdpo"),
    "another engine": ("grpo", "policy.generation.backend=sglang", "policy.generation.sglang_cfg={tp_size: 2}"),
    "drafting": ("grpo", "policy.generation.vllm_kwargs.speculative_config={method: deepseek_mtp}"),
    "experts over several engines": ("grpo", "policy.generation.vllm_cfg.expert_parallel_size=8"),
    "FusedAdam": ("grpo", "policy.optimizer.name=transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"),
    "frozen towers": ("grpo", "policy.dtensor_cfg.automodel_kwargs.freeze_config={freeze_vision_tower: true}"),
    "Megatron LoRA": ("grpo_megatron", "policy.megatron_cfg.peft.enabled=true"),
    "FSDP2 context parallelism": ("grpo", "policy.dtensor_cfg.context_parallel_size=2"),
    "FSDP2 expert parallelism": ("grpo", "policy.dtensor_cfg.expert_parallel_size=8"),
}


def test_all_features_of_the_census_occur() -> None:
    assert ASKING.keys() == QUESTIONS.keys() and KEEPING.keys() == TRANSLATED.keys()


@pytest.mark.parametrize("question", ASKING)
def test_the_census_and_the_translation_find_the_feature(question: str) -> None:
    name, *overrides = ASKING[question]
    tree, translation = with_keys(name, *overrides)
    assert list(features(tree)) == [question]
    assert any(problem.code == "unsupported" for problem in translation.problems)


@pytest.mark.parametrize("feature", KEEPING)
def test_the_census_notices_a_feature_that_a_translation_drops(feature: str) -> None:
    name, *overrides = KEEPING[feature]
    tree, translation = with_keys(name, *overrides)
    assert translation.problems == [] and list(features(tree)) == []
    assert list(dropped(tree, translation.layer, [*translation.changed, *translation.ignored])) == []
    assert list(dropped(tree, {}, [])) == [feature]
