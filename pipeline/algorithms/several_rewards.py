"""Compute GDPO's advantages from several rewards of an answer, on rank 0 (https://arxiv.org/abs/2601.05242).

GRPO normalizes the sum of the rewards in a group, in which different rewards of two answers can have the same sum, and a reward
of a large range hides the others. GDPO normalizes each reward in its group on its own, adds them up, and normalizes the sum
over the step:

    A_nij = (r_nij - b_nij) / s_nij                          of reward n, prompt i, answer j: `group_advantages`
    A_ij  = sum_n w_n A_nij
    A_ij <- (A_ij - mean A) / std A                          over all answers of the step, with the unbiased deviation

The metrics `reward/NAME` of a rollout are its rewards; weights are those of `env.NAME.rewards`, and 1 for rewards that the
user's class or function returns as metrics. An episode without a score has no influence on either statistic. A reward that
does not apply to an answer, as TRL's functions say with None, is left out of its group's statistics and of the answer's sum. An
answer that no reward has seen, since it broke its environment or called tools to the end, has one reward for the whole, such as
`broken_reward`: each of its rewards is this number divided by the sum of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pipeline.algorithms.advantages import group_advantages, scaled, scored_mask, varies
from pipeline.algorithms.sections import RewardedConfig, RewardScalingConfig
from pipeline.types import REWARD, Rollout, RolloutGroup

if TYPE_CHECKING:
    from pipeline.config import EnvironmentConfig, Recipe

Weights = Mapping[str, Mapping[str, float]]
"""Environment -> name of a reward -> its weight."""


def judge_of(recipe: Recipe, name: str) -> EnvironmentConfig:
    """Return the environment that scores the answers of environment `name`: the `judge` in its kwargs, or itself."""
    environment = recipe.env[name]
    return recipe.env.get(str(environment.kwargs.get("judge")), environment)


def weights_of(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Return the weights of all environments of a recipe that have `rewards`, or whose judge has."""
    found = {name: judge_of(recipe, name).rewards for name in recipe.env}
    return {name: {reward.label: reward.weight for reward in rewards} for name, rewards in found.items() if rewards}


def reward_names(groups: list[RolloutGroup], weights: Weights) -> dict[str, dict[str, float]]:
    """Return environment -> name -> weight for the rewards of a step's environments. Raises ValueError for fewer than two.

    weights: of the rewards that the recipe names. An environment without an entry has the rewards that its rollouts have.
    """
    found: dict[str, dict[str, float]] = {}
    for group in groups:
        name = group.prompt.environment
        own = found.setdefault(name, dict(weights.get(name, {})))
        if name not in weights:
            metrics = (metric for rollout in group.rollouts for metric in rollout.metrics)
            own |= {metric.removeprefix(REWARD): 1.0 for metric in metrics if metric.startswith(REWARD)}
    for name, own in found.items():
        judged = (rollout for group in groups if group.prompt.environment == name for rollout in group.rollouts)
        if len(own) < 2 and any(not rollout.failure and not rollout.broke for rollout in judged):
            raise ValueError(
                f"env.{name}: got {len(own)} rewards ({', '.join(own) or 'none'}); expected at least two for"
                f" grpo.adv_estimator.name=gdpo. Try env.{name}.rewards, or metrics {REWARD}NAME of your own class"
            )
    return found


def rewards_of(group: RolloutGroup, weights: Mapping[str, float], scaling: RewardScalingConfig) -> dict[str, np.ndarray]:
    """Return name -> scaled rewards of a group, `[G]` float64; nan for an answer that the reward does not apply to."""
    total = sum(weights.values()) or 1.0

    def reward(rollout: Rollout, name: str) -> float:
        is_seen = any(f"{REWARD}{other}" in rollout.metrics for other in weights)
        return rollout.metrics.get(f"{REWARD}{name}", np.nan) if is_seen else rollout.reward / total

    return {
        name: scaled(np.array([reward(rollout, name) for rollout in group.rollouts], np.float64), scaling) for name in weights
    }


def any_varies(group: RolloutGroup, weights: Mapping[str, float], scaling: RewardScalingConfig) -> bool:
    """Return whether one of the rewards varies in a group, so that GDPO learns from it."""
    return any(varies(rewards[applies]) for _, rewards, applies in _applied(group, weights, scaling))


def _applied(
    group: RolloutGroup, weights: Mapping[str, float], scaling: RewardScalingConfig
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Yield (weight, rewards, mask of the scored answers that the reward applies to) of each reward: `[G]` each."""
    for name, rewards in rewards_of(group, weights, scaling).items():
        if weights[name]:
            yield weights[name], rewards, scored_mask(group) & np.isfinite(rewards)


def step_advantages(
    groups: list[RolloutGroup], weights: Weights, config: RewardedConfig, use_leave_one_out: bool, normalize: bool
) -> list[np.ndarray]:
    """Return the advantages of each group of a step, `[G]`; 0 for failed episodes. Raises ValueError as `reward_names`."""
    named = reward_names(groups, weights)
    sums = []
    for group in groups:
        advantages = np.zeros(len(group.rollouts))
        for weight, rewards, applies in _applied(group, named[group.prompt.environment], config.reward_scaling):
            if applies.any():
                advantages[applies] += weight * group_advantages(rewards[applies], use_leave_one_out, normalize)
        sums.append(advantages)
    return normalized_over_step(sums, [scored_mask(group) for group in groups])


def normalized_over_step(sums: list[np.ndarray], scored: list[np.ndarray]) -> list[np.ndarray]:
    """Return advantages of a step's groups with mean 0 and unbiased deviation 1 over the scored answers; 0 for the others.

    If they do not vary, they become 0.
    """
    everything = np.concatenate([of_group[mask] for of_group, mask in zip(sums, scored, strict=True)])
    if not varies(everything):
        return [np.zeros(len(of_group)) for of_group in sums]
    mean, deviation = everything.mean(), everything.std(ddof=1)
    return [np.where(mask, (of_group - mean) / deviation, 0.0) for of_group, mask in zip(sums, scored, strict=True)]
