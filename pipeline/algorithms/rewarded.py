"""Base class of GRPO and PPO, which learn from rewards. It has their common needs, rewards, policy loss and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.algorithms import turn_credit
from pipeline.algorithms.advantages import is_truncated, make_sample, select_groups, shaped_rewards, varies
from pipeline.algorithms.ahead import problems, settings
from pipeline.algorithms.algorithm import Needs, OnlineAlgorithm
from pipeline.algorithms.sections import LossConfig
from pipeline.recipe.problems import Problem

if TYPE_CHECKING:
    import numpy as np

    from pipeline.config import PolicyConfig, Recipe
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample


class RewardedAlgorithm(OnlineAlgorithm):
    """Base of algorithms whose section is a `RewardedConfig` and whose policy learns with `policy_loss` in loss.py."""

    reads = ("loss_fn", "data.curriculum", "rollout")

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        loss, filtered = recipe.loss_fn, self.section.seq_logprob_error_threshold is not None
        several = self.updates_per_epoch * self.epochs > 1
        several = several and not (loss.force_on_policy_ratio or loss.use_generation_logprobs)
        selects = loss.top_entropy_quantile < 1
        needed_early = filtered or loss.use_kl_in_reward or selects  # something reads them before the first update
        built_in = type(self).__module__.startswith(f"{__package__}.") and loss.custom is None  # a user's may need them
        deterministic = not _dropout(recipe.policy)  # else the log-probs of an update's own pass are others
        self.needs = Needs(
            entropy=loss.log_entropy or loss.entropy_coeff != 0 or selects,
            truncated=True,
            old=several or needed_early,
            old_of_first=not (several and not needed_early and self.epochs == 1 and built_in and deterministic),
            reference=loss.reference_policy_kl_penalty != 0,
            top_entropy=loss.top_entropy_quantile,
            estimates=filtered,
            epochs=self.epochs,
        )

    @property
    @override
    def runs_ahead(self) -> bool:
        config = settings(self.recipe)
        return config is not None and config.runs_ahead

    @property
    def epochs(self) -> int:
        """Number of passes over the samples of a step."""
        return 1

    @override
    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        if self.section.credit == "turn" and self.section.use_dynamic_sampling:
            return [group for group in groups if any(map(varies, turn_credit.scored_returns(group, self.turn_discount)))]
        return select_groups(groups, self.section)

    @property
    def turn_discount(self) -> float:
        """Discount factor of the rewards of later turns, with credit per turn."""
        return 1.0

    @property
    def compares(self) -> bool:
        """True if an answer's advantage depends on other answers, so that a turn which no other episode reaches has none."""
        return True

    @override
    def compute_advantages(self, groups: list[RolloutGroup]) -> list[Sample]:
        samples, rewards = [], [shaped_rewards(group, self.section) for group in groups]
        for group, of_episodes, of_group in zip(groups, self.step_advantages(groups, rewards), rewards, strict=True):
            advantages = self.turn_advantages(group, of_group, of_episodes)
            for rollout, advantage, reward in zip(group.rollouts, advantages, of_group, strict=True):
                counts = turn_credit.counted_turns(rollout, self.section)
                counts &= not (self.section.overlong_filtering and is_truncated(rollout))
                samples.append(make_sample(group.prompt, rollout, advantage, reward, counts))
        return samples

    def turn_advantages(
        self, group: RolloutGroup, rewards: np.ndarray, of_episodes: Sequence[float] | np.ndarray
    ) -> Iterable[float | np.ndarray]:
        """Return the advantage of each rollout; with credit per turn, of each entry of its `turns`, `[N]`.

        rewards: shaped, `[G]`. of_episodes: the advantages of the episodes, `[G]`.
        """
        if self.section.credit == "episode":
            return of_episodes
        of_turns = [turn_credit.turn_rewards(*pair, self.section) for pair in zip(group.rollouts, rewards, strict=True)]
        returns = [turn_credit.returns_to_go(of_rollout, self.turn_discount) for of_rollout in of_turns]
        return turn_credit.turn_advantages(group, returns, of_episodes, 2 if self.compares else 1, self.advantages)

    def step_advantages(self, groups: list[RolloutGroup], rewards: list[np.ndarray]) -> Sequence[Sequence[float] | np.ndarray]:
        """Return the advantages of each group of a step, `[G]`. rewards: of each group, as for `advantages`."""
        return [self.advantages(group, of_group) for group, of_group in zip(groups, rewards, strict=True)]

    def advantages(self, group: RolloutGroup, rewards: np.ndarray) -> Sequence[float] | np.ndarray:
        """Return the advantages of the rollouts of one prompt, `[G]`, from their shaped rewards, `[G]` float64."""
        raise NotImplementedError

    @override
    def estimate(self, batch: PackedBatch) -> PackedBatch:
        from pipeline.algorithms.loss import mask_mismatched_sequences  # needs torch, which submission may lack

        if (threshold := self.section.seq_logprob_error_threshold) is None:
            return batch
        return dataclasses.replace(batch, loss_mask=mask_mismatched_sequences(batch, threshold))

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.loss import policy_loss  # needs torch, which submission may lack

        return policy_loss(self.recipe.loss_fn, outputs, batch, counts)

    # ---- checks ------------------------------------------------------------------------------------------------------------

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self._check_rewards()
        yield from self._check_credit()
        yield from self._check_loss()
        yield from self._check_truncation()
        yield from problems(self.recipe, self.name)
        yield from self._check_surrogate()
        yield from self._check_drift()
        yield from self._check_rollout()
        if self.recipe.loss_fn.force_on_policy_ratio:
            yield from self._check_on_policy()
        if self.recipe.loss_fn.use_generation_logprobs:
            yield from self._check_generation_logprobs()

    def _check_rewards(self) -> Iterator[Problem]:
        config, scaling, shaping = self.section, self.section.reward_scaling, self.section.reward_shaping
        scales, shapes = f"{self.name}.reward_scaling", f"{self.name}.reward_shaping"
        coefficient = shaping.stop_properly_penalty_coef
        if config.use_dynamic_sampling and config.num_generations_per_prompt < 2:
            message = f"got true with {self.name}.num_generations_per_prompt=1; expected at least 2 answers, or false"
            yield Problem(f"{self.name}.use_dynamic_sampling", "contradiction", message)
        if config.batch_multiplier != 1 and not config.use_dynamic_sampling:
            message = f"got {config.batch_multiplier}; expected 1, or {self.name}.use_dynamic_sampling=true"
            yield Problem(f"{self.name}.batch_multiplier", "has-no-effect", message)
        if scaling.enabled and scaling.source_min >= scaling.source_max:
            message = f"got {scaling.source_min}; expected below {scales}.source_max={scaling.source_max}"
            yield Problem(f"{scales}.source_min", "too-large", message)
        if not shaping.enabled:
            return
        if coefficient is not None and coefficient < 1 and scaling.enabled and scaling.target_min < 0:
            message = (
                f"got {coefficient}; expected 1 with {scales}.target_min={scaling.target_min:g}, since a truncated wrong answer"
                f" would get a larger reward than a complete one. Try {scales}.target_min=0"
            )
            yield Problem(f"{shapes}.stop_properly_penalty_coef", "contradiction", message)
        if coefficient is None and (buffer := shaping.overlong_buffer_length) >= (longest := shaping.max_response_length):
            message = f"got {buffer}; expected below {shapes}.max_response_length={longest}, or every answer has a penalty"
            yield Problem(f"{shapes}.overlong_buffer_length", "too-large", message)

    def _check_credit(self) -> Iterator[Problem]:
        config, key = self.section, f"{self.name}.credit"
        if config.credit == "episode":
            return
        if config.max_rollout_turns == 1:
            message = f"got turn with {self.name}.max_rollout_turns=1; expected episode, which is the same for one turn"
            yield Problem(key, "has-no-effect", f"{message}. Try {self.name}.max_rollout_turns=2 or more")
        if config.reward_scaling.enabled:
            message = f"got turn with {self.name}.reward_scaling, which scales the sum of a whole episode's rewards"
            yield Problem(key, "contradiction", f"{message}; expected episode. Try to scale rewards in the environment")

    def _check_loss(self) -> Iterator[Problem]:
        loss = self.recipe.loss_fn
        if loss.sequence_level_importance_ratios and loss.token_level_loss:
            message = "got true with a mean over tokens; expected a mean over sequences. Try loss_fn.token_level_loss=false"
            yield Problem("loss_fn.sequence_level_importance_ratios", "contradiction", message)
        if loss.reference_policy_kl_gradient == "estimate":
            contradictions = {
                "use_kl_in_reward=true": loss.use_kl_in_reward,  # which has no gradient
                "use_on_policy_kl_approximation=true": loss.use_on_policy_kl_approximation,  # a weight of the KL's own gradient
                "reference_policy_kl_type=k1": loss.reference_policy_kl_type == "k1",  # whose gradient is 0 on average
            }
            for setting in (setting for setting, is_set in contradictions.items() if is_set):
                message = f"got estimate with loss_fn.{setting}; expected kl. Try loss_fn.reference_policy_kl_gradient=kl"
                yield Problem("loss_fn.reference_policy_kl_gradient", "contradiction", message)
        if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
            message = "got true with loss_fn.reference_policy_kl_penalty=0; expected false, or a penalty above 0 to subtract"
            yield Problem("loss_fn.use_kl_in_reward", "has-no-effect", message)

    def _check_rollout(self) -> Iterator[Problem]:
        served = [name for name, environment in self.recipe.env.items() if environment.kind == "reward_model"]
        if self.recipe.rollout and served:
            message = f"got a function with env.{served[0]}.kind=reward_model, which scores answers after it; expected null"
            yield Problem("rollout", "contradiction", message)

    def _check_drift(self) -> Iterator[Problem]:
        loss, updates = self.recipe.loss_fn, self.updates_per_epoch * self.epochs
        if loss.drift_penalty and (loss.force_on_policy_ratio or (updates == 1 and not loss.use_generation_logprobs)):
            message = f"got {loss.drift_penalty}, but pi_old is the current policy, from which there is no drift; expected 0"
            yield Problem("loss_fn.drift_penalty", "has-no-effect", f"{message}. Try loss_fn.use_generation_logprobs=true")

    def _check_surrogate(self) -> Iterator[Problem]:
        """Yield a problem for each key that contradicts the surrogate of CISPO, SAPO or DPPO."""
        loss = self.recipe.loss_fn
        required = {
            "use_dppo": (("use_cispo", False, "bounds probabilities, not ratios"), ("use_sapo", False, "is another")),
            "use_sapo": (("token_level_loss", False, "is a mean over sequences"), ("use_cispo", False, "is another")),
            "use_cispo": (("token_level_loss", True, "is a mean over tokens"),),
        }
        flag = next((flag for flag in required if getattr(loss, flag)), None)
        always = (
            ("disable_ppo_ratio", False, "needs the ratio"),
            ("force_on_policy_ratio", False, "needs a ratio other than 1"),
            ("sequence_level_importance_ratios", False, "weighs every token by its own ratio"),
            ("ratio_clip_c", None, "has no surrogate for a dual clip"),
        )
        for name, expected, reason in (*always, *required[flag]) if flag else ():
            if (value := getattr(loss, name)) != expected:
                wanted = "null" if expected is None else str(expected).lower()
                message = f"got {str(value).lower()}; expected {wanted} with loss_fn.{flag}=true, which {reason}"
                yield Problem(f"loss_fn.{name}", "contradiction", message)
        for name in ("sapo_temperature_positive", "sapo_temperature_negative"):
            if not loss.use_sapo and (value := getattr(loss, name)) != getattr(LossConfig, name):
                message = f"got {value} with loss_fn.use_sapo=false, which has no gate. Try loss_fn.use_sapo=true"
                yield Problem(f"loss_fn.{name}", "has-no-effect", message)

    def _check_on_policy(self) -> Iterator[Problem]:
        key, remedy = "loss_fn.force_on_policy_ratio", "expected 1, since an update changes the policy that sampled. Try"
        if self.updates_per_epoch > 1:
            size = f"policy.train_global_batch_size={self.samples_per_step}"
            yield Problem(key, "contradiction", f"got true with {self.updates_per_epoch} updates in a step; {remedy} {size}")
        if self.epochs > 1:
            yield Problem(key, "contradiction", f"got true with {self.epochs} epochs in a step; {remedy} false")

    def _check_generation_logprobs(self) -> Iterator[Problem]:
        """Yield a problem for each key that contradicts use_generation_logprobs, which uses pi_generate as pi_old."""
        loss, threshold = self.recipe.loss_fn, self.section.seq_logprob_error_threshold
        for key, value, required, reason in (
            (
                "loss_fn.use_importance_sampling_correction",
                loss.use_importance_sampling_correction,
                False,
                "the ratio includes this correction",
            ),
            ("loss_fn.force_on_policy_ratio", loss.force_on_policy_ratio, False, "it uses the current policy as the old one"),
            ("loss_fn.disable_ppo_ratio", loss.disable_ppo_ratio, False, "without a ratio, the loss corrects nothing"),
            ("loss_fn.use_kl_in_reward", loss.use_kl_in_reward, False, "it needs the train ranks' log-probs of the old policy"),
            (
                f"{self.name}.seq_logprob_error_threshold",
                threshold,
                None,
                "it needs the train ranks' log-probs of the old policy",
            ),
        ):
            if value != required:
                text, expected = str(value).lower(), "null" if required is None else "false"
                message = f"got {text}; expected {expected} with loss_fn.use_generation_logprobs=true"
                yield Problem(key, "contradiction", f"{message}: {reason}. Try {key}={expected}")

    def _check_truncation(self) -> Iterator[Problem]:
        loss, key = self.recipe.loss_fn, "loss_fn.truncated_importance_sampling"
        kind = loss.truncated_importance_sampling_type
        high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
        if loss.sequence_level_importance_weights and not loss.use_importance_sampling_correction:
            message = "got true; expected false, since the loss has no importance weights"
            yield Problem("loss_fn.sequence_level_importance_weights", "has-no-effect", message)
        if kind is None:
            for name, value in (("ratio", high), ("ratio_min", low)):
                if value is not None:
                    message = f"got {value}; expected null with {key}_type=null. Try {key}_type=tis, icepop or seq-mask-tis"
                    yield Problem(f"{key}_{name}", "has-no-effect", message)
            return
        if not loss.use_importance_sampling_correction:
            cure = "null" if loss.use_generation_logprobs else f"{kind} with loss_fn.use_importance_sampling_correction=true"
            message = f"got {kind}; expected null, since the loss has no importance weights. Try {key}_type={cure}"
            yield Problem(f"{key}_type", "has-no-effect", message)
        if high is None:
            yield Problem(f"{key}_ratio", "missing-value", f"got null; expected a bound above 0 with {key}_type={kind}")
        if kind != "tis" and low is None:
            yield Problem(f"{key}_ratio_min", "missing-value", f"got null; expected a lower bound with {key}_type={kind}")
        if low is not None and high is not None and low > high:
            yield Problem(f"{key}_ratio_min", "too-large", f"got {low}; expected at most {key}_ratio={high}")
        level = (
            "ratios" if loss.sequence_level_importance_ratios else "weights" if loss.sequence_level_importance_weights else ""
        )
        if kind == "seq-mask-tis" and level:
            sequences = f"loss_fn.sequence_level_importance_{level}"
            message = f"got seq-mask-tis, which weights tokens; expected tis or icepop with {sequences}=true"
            yield Problem(f"{key}_type", "contradiction", message)


def _dropout(policy: PolicyConfig) -> bool:
    """Return whether adapters have dropout in training."""
    return policy.dtensor_cfg.lora_cfg.dropout > 0 or policy.megatron_cfg.peft.dropout > 0
