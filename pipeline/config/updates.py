"""How many optimizer updates a step of the algorithm holds, and how often it advances the schedules."""

from __future__ import annotations

from pipeline.config.algorithms import ONLINE
from pipeline.config.schema import Recipe, section, uses_megatron


def updates_per_epoch(recipe: Recipe) -> int:
    """Updates of one pass over the samples of a step; at least 1."""
    if recipe.algorithm not in ONLINE:
        return 1
    config = section(recipe)
    samples = config.num_prompts_per_step * config.num_generations_per_prompt
    return max(1, samples // recipe.policy.train_global_batch_size)


def epochs_per_step(recipe: Recipe) -> int:
    """Passes over the samples of a step."""
    return recipe.ppo.ppo_epochs if recipe.algorithm == "ppo" else 1


def updates_per_step(recipe: Recipe) -> int:
    """Updates of a model that learns in a step."""
    return updates_per_epoch(recipe) * epochs_per_step(recipe)


def advances_per_step(recipe: Recipe) -> int:
    """How often a step advances the schedules of the models that learn in it."""
    return epochs_per_step(recipe) if recipe.ppo.schedule_every_epoch else 1


def has_schedule(recipe: Recipe) -> bool:
    """Whether the policy or the critic has a learning rate that may change."""
    policy = recipe.policy
    own = uses_megatron(policy) and policy.megatron_cfg.scheduler is not None
    return own or policy.scheduler is not None or (recipe.algorithm == "ppo" and recipe.value.scheduler is not None)
