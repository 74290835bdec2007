"""PPO: proximal policy optimization (https://arxiv.org/abs/1707.06347) with a critic.

As in RLHF (https://arxiv.org/abs/2203.02155), the critic predicts the reward before each token. From its predictions
`estimate_gae` computes advantages and returns on the train ranks. The losses are `policy_loss` and `value_loss` in loss.py.
Both models make ppo_epochs passes over a step's samples. Before step policy_training_start_step only the critic learns, and the
policy's learning-rate schedule does not advance.

With async_ppo the engines sample ahead of training. The newest critic predicts when a step trains on the answers, not when they
are sampled. The policy's loss corrects for the older weights that sampled.

A schedule advances once per step, as in verl, or after each epoch with schedule_every_epoch, as in NeMo-RL.

Not supported: a critic that shares the policy's body, VAPO's loss on right answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.algorithms.ahead import AsyncConfig
from pipeline.algorithms.algorithm import Loss
from pipeline.algorithms.rewarded import RewardedAlgorithm
from pipeline.algorithms.sections import GAEConfig, RewardedConfig
from pipeline.algorithms.turn_credit import turn_rewards, with_token_rewards
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import Bool, NotNegative, Positive

if TYPE_CHECKING:
    import numpy as np

    from pipeline.config import Recipe
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample


@dataclass
class PPOConfig(RewardedConfig):
    """Proximal policy optimization with a critic."""

    num_generations_per_prompt: Positive = 1
    """Answers sampled for each prompt."""
    ppo_epochs: Positive = 1
    """Passes over the samples of a step."""
    schedule_every_epoch: Bool = False
    """Advance learning-rate schedules once per epoch, as in NeMo-RL. false: once per step, as in verl."""
    policy_training_start_step: NotNegative = 0
    """First step in which the policy learns. Before it only the critic learns."""
    adv_estimator: GAEConfig = field(default_factory=GAEConfig)
    async_ppo: AsyncConfig = field(default_factory=AsyncConfig)


class PPO(RewardedAlgorithm):
    """Proximal policy optimization with a critic."""

    Section = PPOConfig
    reads = (*RewardedAlgorithm.reads, "value", "value_loss_fn")

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.needs = dataclasses.replace(
            self.needs,
            critic=True,
            estimates=True,
            standardized="unbiased" if self.section.adv_estimator.normalize_advantages else None,
            schedule_every_epoch=self.section.schedule_every_epoch,
        )

    @property
    @override
    def epochs(self) -> int:
        return self.section.ppo_epochs

    @property
    @override
    def losses(self) -> Mapping[str, Loss]:
        return {"policy": self.policy_loss, "critic": self.critic_loss}

    def critic_loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        """Return this batch's share of the critic's loss and of its metrics."""
        from pipeline.algorithms.loss import value_loss  # needs torch, which submission may lack

        return value_loss(self.recipe.value_loss_fn, outputs, batch, counts)

    @override
    def advantages(self, group: RolloutGroup, rewards: np.ndarray) -> Sequence[float]:
        """Return zeros: `estimate` computes the advantages."""
        return [0.0] * len(rewards)

    @override
    def compute_advantages(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Return the samples. With credit per turn, `advantages` has the rewards of tokens, from which `estimate` begins."""
        samples = super().compute_advantages(groups)
        if self.section.credit == "episode":
            return samples
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return [
            with_token_rewards(sample, rollout, turn_rewards(rollout, sample.reward, self.section))
            for sample, rollout in zip(samples, rollouts, strict=True)
        ]

    @override
    def estimate(self, batch: PackedBatch) -> PackedBatch:
        from pipeline.algorithms.token_advantages import estimate_gae  # needs torch, which submission may lack

        batch = super().estimate(batch)
        estimator, of_tokens = self.section.adv_estimator, self.section.credit == "turn"
        advantages, returns = estimate_gae(batch, estimator, self.recipe.loss_fn, of_tokens)
        return dataclasses.replace(batch, advantages=advantages, returns=returns)

    @override
    def trains(self, step: int) -> tuple[str, ...]:
        return ("critic",) if step < self.section.policy_training_start_step else ("critic", "policy")

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        config, estimator = self.section, self.section.adv_estimator
        start, steps = config.policy_training_start_step, config.max_num_steps
        if estimator.length_adaptive_alpha > 0 and (lambda_ := estimator.gae_lambda_policy) is not None:
            message = f"got {lambda_}; expected null with length_adaptive_alpha above 0, which sets the lambda of each answer"
            yield Problem(f"{self.name}.adv_estimator.gae_lambda_policy", "contradiction", message)
        if not self.recipe.value.model_name:
            yield Problem(
                "value.model_name", "missing-value", "got no model; expected a folder or a Hugging Face name for the critic"
            )
        if start >= steps > 0:
            message = f"got {start}; expected below {self.name}.max_num_steps={steps}, or the policy never learns"
            yield Problem(f"{self.name}.policy_training_start_step", "too-large", message)
