"""GRPO: group-relative policy optimization (https://arxiv.org/abs/2402.03300), and the methods derived from it.

The answers to one prompt serve as each other's baseline (advantages.py), so there is no critic. The loss is `policy_loss` in
loss.py. Settings of GRPO give the methods derived from it:

    Dr. GRPO      normalize_rewards=false, use_leave_one_out_baseline=false, token_level_loss=true
    DAPO          use_dynamic_sampling, ratio_clip_max above ratio_clip_min, overlong_filtering, reward_shaping
    GSPO          sequence_level_importance_ratios=true, token_level_loss=false
    CISPO         use_cispo=true
    SAPO          use_sapo=true, token_level_loss=false
    DPPO          use_dppo=true, use_generation_logprobs=true
    RLOO          use_leave_one_out_baseline=true, disable_ppo_ratio=true, normalize_rewards=false
    REINFORCE++   adv_estimator.name=reinforce_plus_plus
    per turn      credit=turn, for episodes of several turns: turn_credit.py
    GDPO          adv_estimator.name=gdpo, with several rewards: several_rewards.py
    MOPD          adv_estimator.name=opd, disable_ppo_ratio=true: teacher_assignment.py

The algorithm of the GRPO paper has use_leave_one_out_baseline=false, token_level_loss=false, and a KL penalty in the loss with
reference_policy_kl_gradient=estimate. Not supported: rewards for parts of a turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from pipeline.algorithms import several_rewards, turn_credit
from pipeline.algorithms.advantages import apply_to_scored, group_advantages, sequence_advantages
from pipeline.algorithms.ahead import AsyncConfig
from pipeline.algorithms.rewarded import RewardedAlgorithm
from pipeline.algorithms.sections import RewardedConfig
from pipeline.algorithms.teacher_assignment import SECTION, loaded_teachers, problems, training_environments, with_teachers
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import Bool, Float

if TYPE_CHECKING:
    from pipeline.config import Recipe
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample


@dataclass
class AdvantageConfig:
    """Estimator of advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = "grpo"
    """Advantage estimator. gdpo: normalize each of env.NAME.rewards in its group, then their weighted sum over the step. opd:
    the log-probs of on_policy_distillation.teachers, without rewards."""
    minus_baseline: Bool = True
    """name=reinforce_plus_plus: subtract the group's mean reward (REINFORCE++-baseline)."""


@dataclass
class GRPOConfig(RewardedConfig):
    """Group relative policy optimization, and its variants (DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++, GDPO, MOPD)."""

    normalize_rewards: Bool = True
    """Divide advantages by the standard deviation of the group's rewards. false: Dr. GRPO."""
    use_leave_one_out_baseline: Bool = True
    """Subtract the mean reward of the other answers in the group, as NeMo-RL does. With normalize_rewards=true, a single right
    answer then counts least. false: subtract the mean of the whole group."""
    adv_estimator: AdvantageConfig = field(default_factory=AdvantageConfig)
    advantage_clip_low: Float | None = None
    """Lower bound of advantages. null: unbounded."""
    advantage_clip_high: Float | None = None
    """Upper bound of advantages. null: unbounded."""
    turn_discount: Annotated[Float, Field(ge=0, le=1)] = 1.0
    """credit=turn: discount factor gamma of the rewards of later turns. GiGPO: 0.95."""
    invalid_tool_call_advantage: Float | None = None
    """Advantage of turns that the environment cannot use, as with a malformed tool call, whatever their reward. NeMo-RL's
    recipes: -5. null: as of other turns."""
    async_grpo: AsyncConfig = field(default_factory=AsyncConfig)


class GRPO(RewardedAlgorithm):
    """Group-relative policy optimization, and the methods that its settings give."""

    Section = GRPOConfig
    reads = (*RewardedAlgorithm.reads, SECTION)

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self._plus_plus = self.section.adv_estimator.name == "reinforce_plus_plus"
        if self._plus_plus:
            self.needs = dataclasses.replace(self.needs, estimates=True, standardized="biased")
        self._decoupled = self.section.adv_estimator.name == "gdpo"
        self._has_teachers = self.section.adv_estimator.name == "opd"
        if self._has_teachers:
            self.needs = dataclasses.replace(self.needs, old=True, old_of_first=True, estimates=True, teacher_logprobs=True)

    @override
    def compute_advantages(self, groups: list[RolloutGroup]) -> list[Sample]:
        samples = super().compute_advantages(groups)
        return with_teachers(self.recipe, groups, samples) if self._has_teachers else samples

    @override
    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        if not self._decoupled or not self.section.use_dynamic_sampling:
            return super().select(groups)
        weights = several_rewards.reward_names(groups, several_rewards.weights_of(self.recipe))
        return [
            group
            for group in groups
            if several_rewards.any_varies(group, weights[group.prompt.environment], self.section.reward_scaling)
        ]

    @override
    def step_advantages(self, groups: list[RolloutGroup], rewards: list[np.ndarray]) -> Sequence[Sequence[float] | np.ndarray]:
        section, weights = self.section, several_rewards.weights_of(self.recipe)
        if not self._decoupled:
            return super().step_advantages(groups, rewards)
        switches = section.use_leave_one_out_baseline, section.normalize_rewards
        return several_rewards.step_advantages(groups, weights, section, *switches)

    @override
    def advantages(self, group: RolloutGroup, rewards: np.ndarray) -> np.ndarray:
        section = self.section
        if self._has_teachers:
            return np.zeros(len(rewards))  # `estimate` computes them
        if self._plus_plus:
            estimator = partial(sequence_advantages, minus_baseline=section.adv_estimator.minus_baseline)
        else:
            options = {"use_leave_one_out": section.use_leave_one_out_baseline, "normalize": section.normalize_rewards}
            estimator = partial(group_advantages, **options)
        return apply_to_scored(group, rewards, estimator)

    @property
    @override
    def turn_discount(self) -> float:
        return self.section.turn_discount

    @property
    @override
    def compares(self) -> bool:
        return not self._plus_plus or self.section.adv_estimator.minus_baseline

    @override
    def turn_advantages(
        self, group: RolloutGroup, rewards: np.ndarray, of_episodes: Sequence[float] | np.ndarray
    ) -> Iterable[float | np.ndarray]:
        advantages, invalid = super().turn_advantages(group, rewards, of_episodes), self.section.invalid_tool_call_advantage
        if invalid is None:
            return advantages
        malformed = [turn_credit.malformed_turns(rollout) for rollout in group.rollouts]
        return [np.where(mask, invalid, advantage) for mask, advantage in zip(malformed, advantages, strict=True)]

    @override
    def estimate(self, batch: PackedBatch) -> PackedBatch:
        from pipeline.algorithms.divergence import teacher_advantages  # needs torch, which submission may lack
        from pipeline.algorithms.token_advantages import subtract_future_kl  # needs torch, which submission may lack

        batch = super().estimate(batch)
        if self._plus_plus and self.recipe.loss_fn.use_kl_in_reward:
            batch = dataclasses.replace(batch, advantages=subtract_future_kl(batch, self.recipe.loss_fn))
        return dataclasses.replace(batch, advantages=teacher_advantages(batch)) if self._has_teachers else batch

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        """Return the loss of the base class, computed with clipped advantages.

        `estimate` cannot clip them, because they are standardized after it.
        """
        from pipeline.algorithms.divergence import teacher_metrics  # needs torch, which submission may lack

        low, high = self.section.advantage_clip_low, self.section.advantage_clip_high
        if low is not None or high is not None:
            batch = dataclasses.replace(batch, advantages=batch.advantages.clamp(low, high))
        output = super().loss(outputs, batch, counts)
        if not self._has_teachers:
            return output
        metrics = teacher_metrics(batch, counts, loaded_teachers(self.recipe))
        return dataclasses.replace(output, metrics=output.metrics | metrics)

    # ---- checks ------------------------------------------------------------------------------------------------------------

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        config, estimator, key = self.section, self.section.adv_estimator, f"{self.name}.adv_estimator"
        low, high = config.advantage_clip_low, config.advantage_clip_high
        yield from self._check_teachers()
        yield from self._check_turns()
        if self._decoupled:
            yield from self._check_several_rewards()
        if self.recipe.rollout and estimator.name == "gdpo":
            message = "got gdpo with a rollout function, which sets the rewards of its turns itself; expected another estimator"
            yield Problem(f"{key}.name", "contradiction", message)
        if config.num_generations_per_prompt < 2 and self.compares and not self._has_teachers:
            message = "got 1; expected at least 2, since one answer has no baseline but itself and every advantage would be 0"
            without = f". Try {key}.minus_baseline=false" if self._plus_plus else ""
            yield Problem(f"{self.name}.num_generations_per_prompt", "too-small", message + without)
        if not self._plus_plus and self.recipe.loss_fn.use_kl_in_reward:
            message = (
                f"got true with {key}.name={estimator.name}, whose advantages use no per-token rewards;"
                f" expected false. Try {key}.name=reinforce_plus_plus, or algorithm=ppo"
            )
            yield Problem("loss_fn.use_kl_in_reward", "contradiction", message)
        for name, value in (("low", low), ("high", high)):
            if value is not None and self.recipe.loss_fn.custom:
                message = f"got {value} with loss_fn.custom, which gets the advantages as they are; expected null"
                yield Problem(f"{self.name}.advantage_clip_{name}", "has-no-effect", message)
        if self.needs.top_entropy < 1 and ((low or 0.0) > 0 or (high or 0.0) < 0):
            message = f"got {self.needs.top_entropy}, which sets advantages to 0; expected 1, or bounds of advantages around 0"
            yield Problem("loss_fn.top_entropy_quantile", "contradiction", message)
        if low is not None and high is not None and low > high:
            message = f"got {low}; expected at most {self.name}.advantage_clip_high={high}"
            yield Problem(f"{self.name}.advantage_clip_low", "too-large", message)

    def _check_several_rewards(self) -> Iterator[Problem]:
        key, weights = f"{self.name}.adv_estimator.name", several_rewards.weights_of(self.recipe)
        for name in training_environments(self.recipe):
            is_own = name in self.recipe.env and "." in (several_rewards.judge_of(self.recipe, name).kind or "")
            if name in self.recipe.env and len(weights.get(name, {})) < 2 and not is_own:  # own code may return several
                message = f"got gdpo, but env.{name} has one reward; expected at least two, each normalized on its own"
                yield Problem(key, "contradiction", f"{message}. Try env.{name}.rewards, or grpo")
        if self.section.reward_shaping.enabled:
            message = f"got true with {key}=gdpo, which uses each reward of its own; expected false, since it shapes their sum"
            yield Problem(f"{self.name}.reward_shaping.enabled", "has-no-effect", f"{message}. Try a reward of the length")

    def _check_turns(self) -> Iterator[Problem]:
        config, estimator = self.section, f"{self.name}.adv_estimator.name={self.section.adv_estimator.name}"
        if config.credit == "turn" and (self._decoupled or self._has_teachers):
            why = "several rewards of the whole episode" if self._decoupled else "log-probs of teachers and no rewards"
            message = f"got turn with {estimator}, which uses {why}; expected episode"
            yield Problem(f"{self.name}.credit", "contradiction", f"{message}. Try {self.name}.adv_estimator.name=grpo")
        for name in ("truncated_turn_penalty", "malformed_turn_penalty") if self._decoupled or self._has_teachers else ():
            if value := getattr(config, name):
                message = f"got {value} with {estimator}, whose advantages ignore this sum of rewards; expected 0"
                yield Problem(f"{self.name}.{name}", "has-no-effect", message)
        if config.credit == "episode" and config.turn_discount != 1:
            message = f"got {config.turn_discount} with {self.name}.credit=episode, which discounts nothing; expected 1"
            yield Problem(f"{self.name}.turn_discount", "has-no-effect", f"{message}. Try {self.name}.credit=turn")
        yield from self._check_invalid_tool_calls()

    def _check_invalid_tool_calls(self) -> Iterator[Problem]:
        config, key = self.section, f"{self.name}.invalid_tool_call_advantage"
        if (value := config.invalid_tool_call_advantage) is None:
            return
        low, high = config.advantage_clip_low, config.advantage_clip_high
        if self._plus_plus or self._has_teachers:
            why = f"{self.name}.adv_estimator.name={config.adv_estimator.name}, which computes advantages later"
            message = f"got {value} with {why}; expected null. Try {self.name}.malformed_turn_penalty"
            yield Problem(key, "contradiction", message)
        if config.mask_malformed_turns:
            message = f"got {value} with {self.name}.mask_malformed_turns=true, which leaves these turns out; expected null"
            yield Problem(key, "has-no-effect", message)
        if (low is not None and value < low) or (high is not None and value > high):
            message = f"got {value}; expected a number within {self.name}.advantage_clip_low and _high, which clip it too"
            yield Problem(key, "contradiction", message)

    def _check_teachers(self) -> Iterator[Problem]:
        teachers, generation = self.recipe.on_policy_distillation.teachers, self.recipe.policy.generation
        name, key = self.section.adv_estimator.name, f"{self.name}.adv_estimator"
        if not self._has_teachers:
            if teachers:
                message = f"got teachers with {key}.name={name}, which uses none. Try {key}.name=opd"
                yield Problem(f"{SECTION}.teachers", "has-no-effect", message)
            return
        if not teachers:
            message = f"got none with {key}.name={name}; expected a teacher for each environment"
            yield Problem(f"{SECTION}.teachers", "missing-value", message)
            return
        yield from problems(self.recipe)
        if self.recipe.loss_fn.use_generation_logprobs:
            message = f"got true with {key}.name=opd, which needs the train ranks' log-probs of pi_old"
            yield Problem("loss_fn.use_generation_logprobs", "contradiction", f"{message}; expected false")
        for limit, neutral in (("top_p", 1.0), ("top_k", None)):
            if (value := getattr(generation, limit)) != neutral:
                message = (
                    f"got {value} with {key}.name={name}; expected {'null' if neutral is None else 1}, since"
                    " opd compares policy and teacher over the whole vocabulary"
                )
                yield Problem(f"policy.generation.{limit}", "contradiction", message)
