"""The other models of a run, each as a policy's configuration, which is what backends are built from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.config.schema import (
    EnvironmentConfig,
    LoRAConfig,
    PolicyConfig,
    Recipe,
    TeacherConfig,
    TokenizerConfig,
    ValueConfig,
    generates,
)


def reward_model(recipe: Recipe) -> EnvironmentConfig | None:
    """The environment whose rewards a model gives; a recipe has one at most."""
    if not generates(recipe):
        return None
    return next((environment for environment in recipe.env.values() if environment.kind == "reward_model"), None)


def critic(recipe: Recipe) -> PolicyConfig:
    value = recipe.value
    return _cut_as_the_policy(
        recipe, value, max_grad_norm=value.max_grad_norm, optimizer=value.optimizer, scheduler=value.scheduler
    )


def teacher(recipe: Recipe) -> PolicyConfig:
    return _cut_as_the_policy(recipe, recipe.teacher)


def judge(recipe: Recipe) -> PolicyConfig:
    """The reward model."""
    environment = reward_model(recipe)
    tokenizer = environment.tokenizer or TokenizerConfig(name=environment.model_name)
    return _cut_as_the_policy(recipe, environment, tokenizer=tokenizer)


def _cut_as_the_policy(recipe: Recipe, model: ValueConfig | TeacherConfig | EnvironmentConfig, **more: Any) -> PolicyConfig:
    """The policy's configuration with another model in it. Megatron-Core's own optimizer keys are the policy's alone."""
    policy = recipe.policy
    return replace(
        policy,
        model_name=model.model_name,
        random_init=getattr(model, "random_init", False),
        hf_config_overrides=model.hf_config_overrides,
        precision=model.precision,
        dtensor_cfg=replace(policy.dtensor_cfg, lora_cfg=LoRAConfig()),
        megatron_cfg=replace(policy.megatron_cfg, optimizer=None, scheduler=None, pipeline_dtype=model.precision),
        **more,
    )
