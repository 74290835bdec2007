"""Sections of the recipe that algorithms share or that losses read. Keys that mean the same as in NeMo-RL have its names."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.algorithms.early_stop import EarlyStopConfig
from pipeline.recipe.values import LIVE, Bool, DottedPath, Float, Int, NotNegative, Positive, interpolation

UNBOUNDED = 1_000_000  # steps, epochs or samples that are no limit; NeMo-RL's -1 becomes this


def bound(number: int) -> int | None:
    """Return a limit on steps, epochs or samples; None if the number stands for no limit."""
    return number if number < UNBOUNDED else None


# ---- rewards ------------------------------------------------------------------------------------------------------------


@dataclass
class RewardScalingConfig:
    """Clamp rewards to the source range, then map that linearly to the target range."""

    enabled: Bool = False
    """Whether to scale rewards."""
    source_min: Float = 0.0
    """Lower end of the source range."""
    source_max: Float = 1.0
    """Upper end of the source range."""
    target_min: Float = 0.0
    """The reward that source_min becomes."""
    target_max: Float = 1.0
    """The reward that source_max becomes."""


@dataclass
class RewardShapingConfig:
    """DAPO's soft penalty for long answers or, with stop_properly_penalty_coef, a factor on the reward of truncated ones."""

    enabled: Bool = False
    """Whether to shape rewards."""
    overlong_buffer_length: Positive = 128
    """Number of tokens before max_response_length over which the penalty grows from 0."""
    overlong_buffer_penalty: Annotated[Float, Field(ge=0)] = 1.0
    """Penalty at max_response_length. It keeps growing for longer answers."""
    max_response_length: Int = interpolation("${policy.max_total_sequence_length}")
    """Length of an answer, in tokens, at which the penalty is full."""
    stop_properly_penalty_coef: Annotated[Float | None, Field(ge=0, le=1)] = None
    """Factor on the reward of truncated answers, in place of the soft penalty. null: truncated answers keep their reward."""


# ---- algorithms that sample ---------------------------------------------------------------------------------------------


@dataclass
class OnlineConfig(EarlyStopConfig):
    """Keys of all algorithms that sample."""

    num_prompts_per_step: Positive = 32
    """Prompts sampled in one step."""
    num_generations_per_prompt: Positive = 16
    """Answers sampled for each prompt."""
    max_rollout_turns: Positive = 1
    """Maximum number of turns in an episode."""
    max_num_steps: Annotated[NotNegative, LIVE] = 1000
    """Steps of the run. 0: validate once and train nothing."""
    max_num_epochs: Annotated[Positive, LIVE] = UNBOUNDED
    """Maximum passes over each data set. The run ends here or at max_num_steps, whichever comes first. 1000000 or more: no
    limit."""
    val_period: Annotated[NotNegative, LIVE] = 0
    """Steps between two validations. 0: never validate."""
    val_at_start: Bool = False
    """Whether to validate before the first step."""
    val_at_end: Annotated[Bool, LIVE] = False
    """Whether to validate after the last step."""
    val_num_generations_per_prompt: Positive = 1
    """Number n of answers to each validation prompt. pass@k is logged for k = 1, 2, 4, ..., n."""
    max_val_samples: Positive = 256
    """Number of records, from the start of each data set, to validate on. data.validation.max_samples draws records at random
    instead."""
    seed: NotNegative = 42
    """Seed of the order of the data and of sampling."""


@dataclass
class RewardedConfig(OnlineConfig):
    """Keys of all algorithms that learn from rewards."""

    use_dynamic_sampling: Bool = False
    """DAPO: train only on groups whose rewards vary, and sample other groups in place of the rest."""
    dynamic_sampling_max_gen_batches: Positive = 10
    """Maximum batches of dynamic sampling for one step. The run fails if they do not fill the step."""
    batch_multiplier: Annotated[Float, Field(ge=1)] = 1.0
    """Prompts in a batch of dynamic sampling, as a multiple of num_prompts_per_step."""
    overlong_filtering: Bool = False
    """Leave truncated answers out of the loss. Truncation then does not discourage long answers."""
    credit: Literal["episode", "turn"] = "episode"
    """Rewards that a turn's tokens answer for. episode: those of all turns. turn: those of this turn and of later turns,
    compared with the group's other episodes at the same turn. With a critic, each reward then arrives with its turn."""
    mask_truncated_turns: Bool = False
    """Leave turns out of the loss that end at a length limit. The other turns of the episode count."""
    mask_malformed_turns: Bool = False
    """Leave turns out of the loss that the environment cannot use, as with a malformed tool call. The others count."""
    truncated_turn_penalty: Annotated[Float, Field(ge=0)] = 0.0
    """Subtracted from the reward of each turn that ends at a length limit."""
    malformed_turn_penalty: Annotated[Float, Field(ge=0)] = 0.0
    """Subtracted from the reward of each turn that the environment cannot use, as with a malformed tool call."""
    seq_logprob_error_threshold: Annotated[Float | None, Field(ge=1)] = None
    """Leave sequences out of the loss if their mean of exp|log pi_old - log pi_generate| exceeds this value. null: keep all."""
    reward_scaling: RewardScalingConfig = field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)


@dataclass
class GAEConfig:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438)."""

    gae_gamma: Annotated[Float, Field(ge=0, le=1)] = 1.0
    """Discount factor gamma."""
    gae_lambda: Annotated[Float, Field(ge=0, le=1)] = 0.95
    """Lambda of returns and advantages."""
    gae_lambda_value: Annotated[Float | None, Field(ge=0, le=1)] = None
    """Lambda of the critic's returns. null: gae_lambda. VAPO: 1."""
    gae_lambda_policy: Annotated[Float | None, Field(ge=0, le=1)] = None
    """Lambda of the policy's advantages. null: gae_lambda."""
    length_adaptive_alpha: Annotated[Float, Field(ge=0)] = 0.0
    """Above 0: the policy's lambda is 1 - 1 / (alpha * tokens of the answer), as in VAPO."""
    normalize_advantages: Bool = True
    """Normalize advantages to mean 0 and variance 1 over the tokens of a step."""


# ---- algorithms that learn from a data set ------------------------------------------------------------------------------


@dataclass
class OfflineConfig(EarlyStopConfig):
    """Keys of all algorithms that learn from a data set."""

    max_num_steps: Annotated[NotNegative, LIVE] = 60
    """Steps of the run. 0: validate once and train nothing."""
    max_num_epochs: Annotated[Positive, LIVE] = UNBOUNDED
    """Maximum passes over the data. The run ends here or at max_num_steps, whichever comes first. 1000000 or more: no limit."""
    val_period: Annotated[NotNegative, LIVE] = 0
    """Steps between two validations. 0: never validate."""
    val_at_start: Bool = False
    """Whether to validate before the first step."""
    val_at_end: Annotated[Bool, LIVE] = False
    """Whether to validate after the last step."""
    max_val_samples: Positive = 256
    """Number of records, from the start of each data set, to validate on."""
    seed: NotNegative = 42
    """Seed of the order of the data."""


# ---- losses -------------------------------------------------------------------------------------------------------------


@dataclass
class LossConfig:
    """The policy's loss. All read custom*; distillation kl_type, mixed_kl_weight, zero_outside_topk; grpo and ppo the rest."""

    custom: DottedPath | None = None
    """Dotted path of your own loss(outputs, batch, counts, **kwargs), which replaces the algorithm's for the policy
    (pipeline/algorithms/custom_loss.py). null: the algorithm's."""
    custom_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the custom loss."""
    reference_policy_kl_penalty: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference policy."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence from the reference policy: http://joschu.net/blog/kl-approx.html."""
    kl_input_clamp_value: Annotated[Float | None, Field(ge=0)] = 20.0
    """Upper bound on the absolute log-ratio from which the KL is estimated. null: unbounded."""
    kl_output_clamp_value: Annotated[Float | None, Field(ge=0)] = 10.0
    """Upper bound on the absolute KL of a token. null: unbounded."""
    use_kl_in_reward: Bool = False
    """Subtract the KL penalty from each token's reward. false: add it to the loss."""
    reference_policy_kl_gradient: Literal["kl", "estimate"] = "kl"
    """Gradient of the KL in the loss. kl: of the KL itself (arXiv 2506.09477), as in NeMo-RL. estimate: of the estimate alone,
    as in the GRPO paper and TRL."""
    use_on_policy_kl_approximation: Bool = False
    """Weight the KL in the loss by pi / pi_generate."""
    ratio_clip_min: Annotated[Float, LIVE, Field(ge=0)] = 0.2
    """Clip the ratio pi / pi_old from below at 1 - ratio_clip_min."""
    ratio_clip_max: Annotated[Float, LIVE, Field(ge=0)] = 0.2
    """Clip the ratio pi / pi_old from above at 1 + ratio_clip_max."""
    ratio_clip_c: Annotated[Float | None, LIVE, Field(gt=1)] = None
    """Dual clip: upper bound of the ratio where the advantage is negative. null: unbounded."""
    disable_ppo_ratio: Bool = False
    """REINFORCE: use advantage * log pi in place of the clipped ratio."""
    force_on_policy_ratio: Bool = False
    """Use pi as pi_old, which saves a forward pass. Needs one update per step."""
    use_generation_logprobs: Bool = False
    """Use the engines' log-probs as the log-probs of pi_old, which saves a forward pass over the step's samples. The clipped
    ratio then also corrects for older weights and different rounding in the engines, so there are no other importance weights.
    Metrics of the mismatch compare the engines with the current policy."""
    use_cispo: Bool = False
    """CISPO's loss: clipped ratios, without a gradient, weight log pi."""
    use_sapo: Bool = False
    """SAPO's loss: a smooth gate on the ratio in place of the clip."""
    sapo_temperature_positive: Annotated[Float, LIVE, Field(gt=0)] = 1.0
    """SAPO: steepness of the gate where the advantage is positive."""
    sapo_temperature_negative: Annotated[Float, LIVE, Field(gt=0)] = 1.05
    """SAPO: steepness of the gate elsewhere."""
    use_dppo: Bool = False
    """DPPO's loss: the ratio is not clipped. A token has no part in it if its probability rose by more than ratio_clip_max, and
    its advantage is positive, or fell by more than ratio_clip_min, and its advantage is negative."""
    drift_penalty: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Weight of log^2(pi / pi_old), which is added to the loss, as in Kimi K2.5."""
    sequence_level_importance_ratios: Bool = False
    """GSPO: use one ratio for a whole sequence. Needs token_level_loss=false."""
    token_level_loss: Bool = True
    """true: mean over all tokens. false: mean over the tokens of each sequence, then over sequences."""
    entropy_coeff: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Weight of the entropy, which is subtracted from the loss."""
    log_entropy: Bool = False
    """Log the exact entropy. false: log only `approx_entropy`, an estimate from the samples."""
    top_entropy_quantile: Annotated[Float, Field(ge=0, le=1)] = 1.0
    """Share of an update's counted tokens, those of the highest entropy, from whose advantages the policy learns
    (https://arxiv.org/abs/2506.01939 has 0.2). The advantages of the others are 0, and with use_kl_in_reward so is the KL
    penalty, which is part of them; divisors, a KL penalty in the loss and the entropy bonus are unchanged. The entropy is that
    of pi_old, which takes a forward pass; the metric `entropy_threshold` is the lowest of the share, in nats. 0: only the token
    of the highest entropy. 1: all."""
    use_importance_sampling_correction: Bool = False
    """Weight tokens by pi_old / pi_generate, which corrects for older weights and different rounding in the engines."""
    sequence_level_importance_weights: Bool = False
    """All tokens of a sequence have the product of its weights pi_old / pi_generate, as always with
    sequence_level_importance_ratios."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """How to bound the weights pi_old / pi_generate. null: unbounded."""
    truncated_importance_sampling_ratio: Annotated[Float | None, Field(gt=0)] = None
    """Upper bound of the weights pi_old / pi_generate."""
    truncated_importance_sampling_ratio_min: Float | None = None
    """Lower bound of the weights pi_old / pi_generate."""
    kl_type: Literal["forward", "reverse", "mixed", "uld", "gold"] = "mixed"
    """Divergence between teacher and policy. uld, gold: for teachers with another vocabulary, over chunks of text. uld compares
    the probabilities of the i-th most likely tokens. gold compares tokens with the same text, and only the others by rank."""
    mixed_kl_weight: Annotated[Float, LIVE, Field(ge=0, le=1)] = 0.5
    """kl_type=mixed and gold: weight of the forward divergence."""
    uld_hybrid_matched_weight: Annotated[Float, LIVE, Field(ge=0)] = 1.0
    """kl_type=gold: weight of the tokens with the same text in both vocabularies."""
    uld_hybrid_unmatched_weight: Annotated[Float, LIVE, Field(ge=0)] = 1.0
    """kl_type=gold: weight of the other tokens."""
    zero_outside_topk: Bool = False
    """Renormalize only the teacher over its top k tokens. false: renormalize the policy too."""


@dataclass
class ValueLossConfig:
    """The critic's loss."""

    scale: Annotated[Float, LIVE, Field(ge=0)] = 1.0
    """Weight of the critic's loss."""
    cliprange: Annotated[Float | None, LIVE, Field(gt=0)] = 0.2
    """Bound on the change of a value within a step. null: unbounded."""
