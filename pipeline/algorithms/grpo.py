"""GRPO: group-relative policy optimization (https://arxiv.org/abs/2402.03300), with what later papers changed about it.

The answers to one prompt are each other's baseline, so there is no critic: advantages.py. The loss is `policy_loss` in loss.py.
GRPO's descendants are settings of it:

    Dr. GRPO      normalize_rewards=false, use_leave_one_out_baseline=false, token_level_loss=true
    DAPO          use_dynamic_sampling, ratio_clip_max above ratio_clip_min, overlong_filtering, reward_shaping
    GSPO          sequence_level_importance_ratios=true, token_level_loss=false
    CISPO         use_cispo=true
    RLOO          use_leave_one_out_baseline=true, disable_ppo_ratio=true, normalize_rewards=false
    REINFORCE++   adv_estimator.name=reinforce_plus_plus

The GRPO paper itself is use_leave_one_out_baseline=false, token_level_loss=false and a KL penalty in the loss. Left out:
rewards for parts of an answer (process supervision).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipeline.algorithms.advantages import (
    group_advantages,
    is_cut,
    judged,
    minus_kl_to_come,
    sample,
    selected,
    sequence_advantages,
    shaped_rewards,
)
from pipeline.algorithms.base import Needs
from pipeline.algorithms.loss import policy_loss, trusted
from pipeline.config import GRPOConfig, LossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample


class GRPO:
    def __init__(self, grpo: GRPOConfig, loss: LossConfig, updates_per_step: int):
        self._grpo = grpo
        self._loss = loss
        self._plus_plus = grpo.adv_estimator.name == "reinforce_plus_plus"
        filtered = grpo.seq_logprob_error_threshold is not None
        several = updates_per_step > 1 and not loss.force_on_policy_ratio
        self.needs = Needs(
            entropy=loss.log_entropy or loss.entropy_coeff != 0,
            truncated=True,
            old=several or filtered or loss.use_kl_in_reward,
            reference=loss.reference_policy_kl_penalty != 0,
            estimates=filtered or self._plus_plus,
            standardized="biased" if self._plus_plus else None,
        )
        self.losses = {"policy": self.loss}

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return selected(groups, self._grpo)

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        return [
            sample(group.prompt, rollout, advantage, reward, counts=not (self._grpo.overlong_filtering and is_cut(rollout)))
            for group in groups
            for rollout, advantage, reward in zip(group.rollouts, *self._judge(group), strict=True)
        ]

    def _judge(self, group: RolloutGroup) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, rewards), `[G]` each. The advantage of an episode that nobody judged is 0."""
        rewards, among = shaped_rewards(group, self._grpo), judged(group)
        advantages = np.zeros(len(rewards))
        if among.any():
            advantages[among] = self._advantages(rewards[among])
        return advantages, rewards

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        """`[G]` -> `[G]`."""
        estimator = self._grpo.adv_estimator
        if self._plus_plus:
            return sequence_advantages(rewards, estimator.minus_baseline)
        return group_advantages(rewards, estimator.use_leave_one_out_baseline, estimator.normalize_rewards)

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        if (threshold := self._grpo.seq_logprob_error_threshold) is not None:
            batch = dataclasses.replace(batch, loss_mask=trusted(batch, threshold))
        if self._plus_plus and self._loss.use_kl_in_reward:
            batch = dataclasses.replace(batch, advantages=minus_kl_to_come(batch, self._loss))
        return batch

    def trains(self, step: int) -> tuple[str, ...]:
        return ("policy",)

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        """Advantages are clipped here, where they are final: standardizing comes after `estimate`."""
        low, high = self._grpo.advantage_clip_low, self._grpo.advantage_clip_high
        if low is not None or high is not None:
            batch = dataclasses.replace(batch, advantages=batch.advantages.clamp(low, high))
        return policy_loss(self._loss, outputs, batch, counts)
