"""What becomes of rewards before advantages are made of them.

    scaled   target_min + (clamp(r, source_min, source_max) - source_min) (target_max - target_min) / (source_max - source_min)
    shaped   scaled + DAPO's soft penalty for long answers (dapo.py); or, with stop_properly_penalty_coef, scaled times that for
             answers that were cut for length

as NeMo-RL has them under `reward_scaling` and `reward_shaping`. Left out: rewards of several components.
"""

from __future__ import annotations

import numpy as np

from pipeline.algorithms.dapo import soft_overlong_penalty, varies
from pipeline.config import RewardedConfig, RewardScalingConfig, RewardShapingConfig
from pipeline.types import Rollout, RolloutGroup


def judged(group: RolloutGroup) -> np.ndarray:
    """`[G]` bool: False for an episode that its environment failed. It has no reward, and is no part of what others' are
    compared with."""
    return np.array([not rollout.failure for rollout in group.rollouts], np.bool_)


def is_cut(rollout: Rollout) -> bool:
    """Whether the answer, of several turns the last, ended because there was no more room."""
    return rollout.finish == "length"


def scaled_rewards(group: RolloutGroup, config: RewardScalingConfig) -> np.ndarray:
    """`[G]` float64; of an episode that was not judged, no matter what."""
    rewards = np.array([rollout.reward for rollout in group.rollouts], np.float64)
    if not config.enabled:
        return rewards
    share = (rewards.clip(config.source_min, config.source_max) - config.source_min) / (config.source_max - config.source_min)
    return config.target_min + share * (config.target_max - config.target_min)


def shaped_rewards(group: RolloutGroup, config: RewardedConfig) -> np.ndarray:
    """`[G]` float64: scaled, then shaped."""
    return _shape(scaled_rewards(group, config.reward_scaling), group, config.reward_shaping)


def _shape(rewards: np.ndarray, group: RolloutGroup, config: RewardShapingConfig) -> np.ndarray:
    if not config.enabled:
        return rewards
    if config.stop_properly_penalty_coef is not None:
        return np.where([is_cut(rollout) for rollout in group.rollouts], rewards * config.stop_properly_penalty_coef, rewards)
    lengths = np.array([rollout.drawn_tokens for rollout in group.rollouts])
    return rewards + soft_overlong_penalty(
        lengths, config.max_response_length, config.overlong_buffer_length, config.overlong_buffer_penalty
    )


def selected(groups: list[RolloutGroup], config: RewardedConfig) -> list[RolloutGroup]:
    """With dynamic sampling those whose rewards vary, before they are shaped; else all."""
    if not config.use_dynamic_sampling:
        return groups
    return [group for group in groups if varies(scaled_rewards(group, config.reward_scaling)[judged(group)])]
