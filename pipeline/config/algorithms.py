"""The recipe's keys of the algorithms: their sections, and the losses'. Names are NeMo-RL's where they mean the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional  # OmegaConf reads these annotations at run time

ONLINE = ("grpo", "ppo", "distillation")  # they sample, so that the job has a generate component
OFFLINE = ("sft", "dpo", "rm")  # they learn from a data set
PAIRED = ("dpo", "rm")  # of which an example is a chosen and a rejected answer
UNBOUNDED = 1_000_000  # so many steps, epochs or samples bound nothing: what NeMo-RL's -1 becomes


def bound(number: int) -> int | None:
    """Of steps, epochs or samples; None if it bounds nothing."""
    return number if number < UNBOUNDED else None


# ---- what shapes a reward -----------------------------------------------------------------------------------------------


@dataclass
class RewardScalingConfig:
    """A reward is clamped to the source range, which is then mapped to the target range."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


@dataclass
class RewardShapingConfig:
    """DAPO's soft penalty for long answers; or, with stop_properly_penalty_coef, a factor on the reward of cut ones."""

    enabled: bool = False
    overlong_buffer_length: int = 128  # tokens before max_response_length over which the penalty grows
    overlong_buffer_penalty: float = 1.0  # at max_response_length; it grows on beyond, where answers may be longer
    max_response_length: int = "${policy.max_total_sequence_length}"  # type: ignore[assignment]
    stop_properly_penalty_coef: Optional[float] = (
        None  # in [0, 1]; replaces the soft penalty; null: cut answers are judged as they are
    )


# ---- algorithms that sample ---------------------------------------------------------------------------------------------


@dataclass
class OnlineConfig:
    """What the sections of all algorithms that sample have."""

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 16
    max_rollout_turns: int = 1  # of an episode
    max_num_steps: int = 1000  # 0: validate once, learn nothing
    max_num_epochs: int = UNBOUNDED  # over each data set; the run ends at whichever comes first
    val_period: int = 0  # in steps; 0: never
    val_at_start: bool = False
    val_at_end: bool = False
    val_num_generations_per_prompt: int = 1  # n: pass@k is told for k = 1, 2, 4 ... up to n
    max_val_samples: int = 256  # of each data set the first; data.validation.max_samples draws them by its seed
    seed: int = 42


@dataclass
class RewardedConfig(OnlineConfig):
    """What those have that learn from rewards."""

    use_dynamic_sampling: bool = False  # DAPO: only groups whose rewards vary are trained on, others are sampled anew
    dynamic_sampling_max_gen_batches: int = 10  # the run ends if so many batches do not fill a step
    batch_multiplier: float = 1.0  # prompts in a batch of dynamic sampling, as a multiple of num_prompts_per_step
    overlong_filtering: bool = False  # answers that were cut for length do not count in the loss
    seq_logprob_error_threshold: Optional[float] = (
        None  # sequences with a higher mean of exp|log pi_old - log pi_generate| do not
    )
    reward_scaling: RewardScalingConfig = field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)


@dataclass
class AdvantageConfig:
    name: str = "grpo"  # grpo, reinforce_plus_plus
    normalize_rewards: bool = "${grpo.normalize_rewards}"  # type: ignore[assignment]
    use_leave_one_out_baseline: bool = "${grpo.use_leave_one_out_baseline}"  # type: ignore[assignment]
    minus_baseline: bool = True  # reinforce_plus_plus: subtract the group's mean (REINFORCE++-baseline)


@dataclass
class AsyncConfig:
    """Generation runs ahead of training. The age of a rollout: the step that trains on it, less the version of the weights that
    began it."""

    enabled: bool = False
    max_trajectory_age_steps: int = 1  # 0: as without
    in_flight_weight_updates: bool = False  # a refit does not wait for rollouts under way: they go on with the new weights
    recompute_kv_cache_after_weight_updates: bool = False  # of those: keys and values anew, else as the old weights made them
    # wait: a step trains on the oldest prompts. keep: on those that are complete; half of the age is for those that are not.
    # cut: on the oldest, of which the last straggler_share of the answers are cut where they are
    stragglers: str = "wait"
    straggler_share: float = 0.05
    # Also while it is off, and as it is here for other algorithms:
    max_generation_failures: int = 10  # groups in a row that nobody could judge, by no answer's doing; one more ends the run


@dataclass
class GRPOConfig(RewardedConfig):
    normalize_rewards: bool = True  # divide advantages by the group's standard deviation; false: Dr. GRPO
    use_leave_one_out_baseline: bool = True  # NeMo-RL's; with normalize_rewards a lone right answer counts least: README.md
    adv_estimator: AdvantageConfig = field(default_factory=AdvantageConfig)
    advantage_clip_low: Optional[float] = None
    advantage_clip_high: Optional[float] = None
    async_grpo: AsyncConfig = field(default_factory=AsyncConfig)


@dataclass
class GAEConfig:
    name: str = "gae"
    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_lambda_value: Optional[float] = None  # of the critic's returns; null: gae_lambda (VAPO: 1)
    gae_lambda_policy: Optional[float] = None  # of the policy's advantages; null: gae_lambda
    length_adaptive_alpha: float = 0.0  # above 0: the policy's lambda is 1 - 1 / (alpha * tokens of the answer) (VAPO)
    normalize_advantages: bool = True  # to mean 0 and variance 1 over the tokens of a step


@dataclass
class PPOConfig(RewardedConfig):
    num_generations_per_prompt: int = 1
    ppo_epochs: int = 1  # passes over the samples of a step
    schedule_every_epoch: bool = (
        False  # true: schedules advance once per epoch, as in NeMo-RL; false: once per step, as in verl
    )
    policy_training_start_step: int = 0  # before it only the critic learns
    adv_estimator: GAEConfig = field(default_factory=GAEConfig)


@dataclass
class DistillationConfig(OnlineConfig):
    num_prompts_per_step: int = 128
    num_generations_per_prompt: int = 1
    topk_logits_k: int = 64  # the teacher's most likely tokens, over which the divergence is summed


# ---- algorithms that learn from a data set ------------------------------------------------------------------------------


@dataclass
class OfflineConfig:
    max_num_steps: int = 60  # 0: validate once, learn nothing
    max_num_epochs: int = UNBOUNDED
    val_period: int = 0
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: int = 256
    seed: int = 42


@dataclass
class SFTConfig(OfflineConfig):
    pass


@dataclass
class DPOConfig(OfflineConfig):
    """policy.train_global_batch_size counts pairs."""

    preference_loss: str = "sigmoid"  # sigmoid (DPO), ipo
    reference_policy_kl_penalty: float = 0.05  # beta
    label_smoothing: float = 0.0  # of sigmoid: how often a label is taken to be wrong (conservative DPO)
    preference_average_log_probs: bool = False  # of sigmoid: log-ratios per token of the answer
    reference_free: bool = False  # the reference is uniform
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0  # of the chosen answers' negative log-likelihood
    sft_average_log_probs: bool = "${.preference_average_log_probs}"  # type: ignore[assignment]


@dataclass
class RMConfig(OfflineConfig):
    """policy.train_global_batch_size counts pairs; `policy` is the reward model."""


# ---- losses -------------------------------------------------------------------------------------------------------------


@dataclass
class LossConfig:
    """Of grpo and ppo, but for the last three keys, which are distillation's."""

    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: str = "k3"  # k1, k2, k3: http://joschu.net/blog/kl-approx.html
    kl_input_clamp_value: Optional[float] = 20.0
    kl_output_clamp_value: Optional[float] = 10.0
    use_kl_in_reward: bool = False  # the penalty is taken off each token's reward, not added to the loss
    use_on_policy_kl_approximation: bool = False  # weigh the loss's KL by pi / pi_generate
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: Optional[float] = None  # dual clip, above 1
    disable_ppo_ratio: bool = False  # REINFORCE: A log pi in place of the clipped ratio
    force_on_policy_ratio: bool = False  # pi_old is pi: no forward pass for it; needs one update per step
    use_cispo: bool = False
    sequence_level_importance_ratios: bool = False  # GSPO; needs token_level_loss=false
    token_level_loss: bool = True  # False: mean over tokens within a sequence, then over sequences
    entropy_coeff: float = 0.0  # of the entropy that is subtracted from the loss
    log_entropy: bool = False  # the exact entropy as a metric; without, `approx_entropy` estimates it from the samples
    use_importance_sampling_correction: bool = False  # weigh tokens by pi_old / pi_generate
    truncated_importance_sampling_type: Optional[str] = None  # tis, icepop, seq-mask-tis
    truncated_importance_sampling_ratio: Optional[float] = None  # its upper bound
    truncated_importance_sampling_ratio_min: Optional[float] = None  # its lower bound
    kl_type: str = "mixed"  # forward, reverse, mixed
    mixed_kl_weight: float = 0.5  # of the forward divergence
    zero_outside_topk: bool = False  # False: policy and teacher are renormalised over the top k; True: only the teacher is


@dataclass
class ValueLossConfig:
    scale: float = 1.0
    cliprange: Optional[float] = 0.2  # of the critic's change within a step; null: none
