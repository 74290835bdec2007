"""How many optimizer updates a step of the algorithm holds, and how often it advances the schedules."""

from __future__ import annotations

from pipeline.algorithms import build
from pipeline.config.schema import Recipe, uses_megatron


def updates_per_epoch(recipe: Recipe) -> int:
    """Updates of one pass over the samples of a step; at least 1."""
    return build(recipe).updates_per_epoch


def epochs_per_step(recipe: Recipe) -> int:
    """Passes over the samples of a step."""
    return build(recipe).needs.epochs


def updates_per_step(recipe: Recipe) -> int:
    """Updates of a model that learns in a step."""
    return updates_per_epoch(recipe) * epochs_per_step(recipe)


def advances_per_step(recipe: Recipe) -> int:
    """How often a step advances the schedules of the models that learn in it."""
    return epochs_per_step(recipe) if build(recipe).needs.schedule_every_epoch else 1


def has_schedule(recipe: Recipe) -> bool:
    """Whether the policy or the critic has a learning rate that may change."""
    policy = recipe.policy
    own = uses_megatron(policy) and policy.megatron_cfg.scheduler is not None
    return own or policy.scheduler is not None or (build(recipe).needs.critic and recipe.value.scheduler is not None)
