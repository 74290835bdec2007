"""PPO: proximal policy optimization (https://arxiv.org/abs/1707.06347) with a critic, as RLHF has it
(https://arxiv.org/abs/2203.02155).

The critic estimates before each token what reward to expect, of which `estimate_gae` makes advantages and returns on the train
ranks. The losses are `policy_loss` and `value_loss` in loss.py; both models go over a step's samples ppo_epochs times. Before
step policy_training_start_step only the critic learns, and the policy's schedule stays where it is.

A schedule advances once per step, as in verl, or after each epoch with schedule_every_epoch, as in NeMo-RL.

Left out: a critic that shares the policy's body, VAPO's loss on right answers.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from pipeline.algorithms.advantages import estimate_gae, is_cut, sample, selected, shaped_rewards
from pipeline.algorithms.base import Needs
from pipeline.algorithms.loss import policy_loss, trusted, value_loss
from pipeline.config import LossConfig, PPOConfig, ValueLossConfig
from pipeline.types import PackedBatch, RolloutGroup, Sample


class PPO:
    def __init__(self, ppo: PPOConfig, loss: LossConfig, value: ValueLossConfig, updates_per_step: int):
        self._ppo = ppo
        self._loss = loss
        several = updates_per_step * ppo.ppo_epochs > 1 and not loss.force_on_policy_ratio
        filtered = ppo.seq_logprob_error_threshold is not None
        self.needs = Needs(
            entropy=loss.log_entropy or loss.entropy_coeff != 0,
            truncated=True,
            old=several or filtered or loss.use_kl_in_reward,
            reference=loss.reference_policy_kl_penalty != 0,
            critic=True,
            estimates=True,
            standardized="unbiased" if ppo.adv_estimator.normalize_advantages else None,
            epochs=ppo.ppo_epochs,
            schedule_every_epoch=ppo.schedule_every_epoch,
        )
        self.losses = {"policy": partial(policy_loss, loss), "critic": partial(value_loss, value)}

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return selected(groups, self._ppo)

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Samples have their rewards; advantages come with `estimate`."""
        return [
            sample(group.prompt, rollout, 0.0, reward, counts=not (self._ppo.overlong_filtering and is_cut(rollout)))
            for group in groups
            for rollout, reward in zip(group.rollouts, shaped_rewards(group, self._ppo), strict=True)
        ]

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        if (threshold := self._ppo.seq_logprob_error_threshold) is not None:
            batch = dataclasses.replace(batch, loss_mask=trusted(batch, threshold))
        advantages, returns = estimate_gae(batch, self._ppo.adv_estimator, self._loss)
        return dataclasses.replace(batch, advantages=advantages, returns=returns)

    def trains(self, step: int) -> tuple[str, ...]:
        return ("critic",) if step < self._ppo.policy_training_start_step else ("critic", "policy")
