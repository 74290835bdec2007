"""Sections of the recipe that algorithms share or that losses read. Keys that mean the same as in NeMo-RL have its names."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from pipeline.algorithms.early_stop import EarlyStopConfig
from pipeline.recipe.values import LIVE, Bool, Float, Int, NotNegative, Positive, interpolation

UNBOUNDED = 1_000_000  # steps, epochs or samples that are no limit; NeMo-RL's -1 becomes this


def bound(number: int) -> int | None:
    """Return a limit on steps, epochs or samples; None if the number stands for no limit."""
    return number if number < UNBOUNDED else None


# ---- rewards ------------------------------------------------------------------------------------------------------------


@dataclass
class RewardScalingConfig:
    """Clamp rewards to the source range, then map that linearly to the target range."""

    enabled: Annotated[Bool, Field(description="Whether to scale rewards.")] = False
    source_min: Annotated[Float, Field(description="Lower end of the source range.")] = 0.0
    source_max: Annotated[Float, Field(description="Upper end of the source range.")] = 1.0
    target_min: Annotated[Float, Field(description="The reward that source_min becomes.")] = 0.0
    target_max: Annotated[Float, Field(description="The reward that source_max becomes.")] = 1.0


@dataclass
class RewardShapingConfig:
    """DAPO's soft penalty for long answers or, with stop_properly_penalty_coef, a factor on the reward of truncated ones."""

    enabled: Annotated[Bool, Field(description="Whether to shape rewards.")] = False
    overlong_buffer_length: Annotated[
        Positive, Field(description="Number of tokens before max_response_length over which the penalty grows from 0.")
    ] = 128
    overlong_buffer_penalty: Annotated[
        Float, Field(ge=0, description="Penalty at max_response_length. It keeps growing for longer answers.")
    ] = 1.0
    max_response_length: Annotated[Int, Field(description="Length of an answer, in tokens, at which the penalty is full.")] = (
        interpolation("${policy.max_total_sequence_length}")
    )
    stop_properly_penalty_coef: Annotated[
        Float | None,
        Field(
            ge=0,
            le=1,
            description="Factor on the reward of truncated answers, in place of the soft penalty. null: truncated answers"
            " keep their reward.",
        ),
    ] = None


# ---- algorithms that sample ---------------------------------------------------------------------------------------------


@dataclass
class OnlineConfig(EarlyStopConfig):
    """Keys of all algorithms that sample."""

    num_prompts_per_step: Annotated[Positive, Field(description="Prompts sampled in one step.")] = 32
    num_generations_per_prompt: Annotated[Positive, Field(description="Answers sampled for each prompt.")] = 16
    max_rollout_turns: Annotated[Positive, Field(description="Maximum number of turns in an episode.")] = 1
    max_num_steps: Annotated[NotNegative, LIVE, Field(description="Steps of the run. 0: validate once and train nothing.")] = (
        1000
    )
    max_num_epochs: Annotated[
        Positive,
        LIVE,
        Field(
            description="Maximum passes over each data set. The run ends here or at max_num_steps, whichever comes first."
            " 1000000 or more: no limit."
        ),
    ] = UNBOUNDED
    val_period: Annotated[NotNegative, LIVE, Field(description="Steps between two validations. 0: never validate.")] = 0
    val_start_at: Annotated[
        NotNegative,
        LIVE,
        Field(description="First step after which val_period may validate. It does not affect val_at_start and val_at_end."),
    ] = 0
    val_at_start: Annotated[Bool, Field(description="Whether to validate before the first step.")] = False
    val_at_end: Annotated[Bool, LIVE, Field(description="Whether to validate after the last step.")] = False
    val_num_generations_per_prompt: Annotated[
        Positive, Field(description="Number n of answers to each validation prompt. pass@k is logged for k = 1, 2, 4, ..., n.")
    ] = 1
    max_val_samples: Annotated[
        Positive,
        Field(
            description="Number of records, from the start of each data set, to validate on. data.validation.max_samples"
            " draws records at random instead."
        ),
    ] = 256
    seed: Annotated[NotNegative, Field(description="Seed of the order of the data and of sampling.")] = 42


@dataclass
class RewardedConfig(OnlineConfig):
    """Keys of all algorithms that learn from rewards."""

    use_dynamic_sampling: Annotated[
        Bool, Field(description="DAPO: train only on groups whose rewards vary, and sample other groups in place of the rest.")
    ] = False
    dynamic_sampling_max_gen_batches: Annotated[
        Positive,
        Field(description="Maximum batches of dynamic sampling for one step. The run fails if they do not fill the step."),
    ] = 10
    batch_multiplier: Annotated[
        Float, Field(ge=1, description="Prompts in a batch of dynamic sampling, as a multiple of num_prompts_per_step.")
    ] = 1.0
    overlong_filtering: Annotated[
        Bool, Field(description="Leave truncated answers out of the loss. Truncation then does not discourage long answers.")
    ] = False
    seq_logprob_error_threshold: Annotated[
        Float | None,
        Field(
            ge=1,
            description="Leave sequences out of the loss if their mean of exp|log pi_old - log pi_generate| exceeds this"
            " value. null: keep all.",
        ),
    ] = None
    reward_scaling: RewardScalingConfig = field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)


@dataclass
class GAEConfig:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438)."""

    name: Annotated[Literal["gae"], Field(description="Advantage estimator.")] = "gae"
    gae_gamma: Annotated[Float, Field(ge=0, le=1, description="Discount factor gamma.")] = 1.0
    gae_lambda: Annotated[Float, Field(ge=0, le=1, description="Lambda of returns and advantages.")] = 0.95
    gae_lambda_value: Annotated[
        Float | None, Field(ge=0, le=1, description="Lambda of the critic's returns. null: gae_lambda. VAPO: 1.")
    ] = None
    gae_lambda_policy: Annotated[
        Float | None, Field(ge=0, le=1, description="Lambda of the policy's advantages. null: gae_lambda.")
    ] = None
    length_adaptive_alpha: Annotated[
        Float, Field(ge=0, description="Above 0: the policy's lambda is 1 - 1 / (alpha * tokens of the answer), as in VAPO.")
    ] = 0.0
    normalize_advantages: Annotated[
        Bool, Field(description="Normalize advantages to mean 0 and variance 1 over the tokens of a step.")
    ] = True


# ---- algorithms that learn from a data set ------------------------------------------------------------------------------


@dataclass
class OfflineConfig(EarlyStopConfig):
    """Keys of all algorithms that learn from a data set."""

    max_num_steps: Annotated[NotNegative, LIVE, Field(description="Steps of the run. 0: validate once and train nothing.")] = 60
    max_num_epochs: Annotated[
        Positive,
        LIVE,
        Field(
            description="Maximum passes over the data. The run ends here or at max_num_steps, whichever comes first."
            " 1000000 or more: no limit."
        ),
    ] = UNBOUNDED
    val_period: Annotated[NotNegative, LIVE, Field(description="Steps between two validations. 0: never validate.")] = 0
    val_at_start: Annotated[Bool, Field(description="Whether to validate before the first step.")] = False
    val_at_end: Annotated[Bool, LIVE, Field(description="Whether to validate after the last step.")] = False
    max_val_samples: Annotated[
        Positive, Field(description="Number of records, from the start of each data set, to validate on.")
    ] = 256
    seed: Annotated[NotNegative, Field(description="Seed of the order of the data.")] = 42


# ---- losses -------------------------------------------------------------------------------------------------------------


@dataclass
class LossConfig:
    """The policy's loss. Distillation reads kl_type, mixed_kl_weight and zero_outside_topk; grpo and ppo the other keys."""

    reference_policy_kl_penalty: Annotated[
        Float, LIVE, Field(ge=0, description="Weight of the KL divergence from the reference policy.")
    ] = 0.0
    reference_policy_kl_type: Annotated[
        Literal["k1", "k2", "k3"],
        Field(description="Estimator of the KL divergence from the reference policy: http://joschu.net/blog/kl-approx.html."),
    ] = "k3"
    kl_input_clamp_value: Annotated[
        Float | None,
        Field(ge=0, description="Upper bound on the absolute log-ratio from which the KL is estimated. null: unbounded."),
    ] = 20.0
    kl_output_clamp_value: Annotated[
        Float | None, Field(ge=0, description="Upper bound on the absolute KL of a token. null: unbounded.")
    ] = 10.0
    use_kl_in_reward: Annotated[
        Bool, Field(description="Subtract the KL penalty from each token's reward. false: add it to the loss.")
    ] = False
    reference_policy_kl_gradient: Annotated[
        Literal["kl", "estimate"],
        Field(
            description="Gradient of the KL in the loss. kl: of the KL itself (arXiv 2506.09477), as in NeMo-RL."
            " estimate: of the estimate alone, as in the GRPO paper and TRL."
        ),
    ] = "kl"
    use_on_policy_kl_approximation: Annotated[Bool, Field(description="Weight the KL in the loss by pi / pi_generate.")] = False
    ratio_clip_min: Annotated[
        Float, LIVE, Field(ge=0, description="Clip the ratio pi / pi_old from below at 1 - ratio_clip_min.")
    ] = 0.2
    ratio_clip_max: Annotated[
        Float, LIVE, Field(ge=0, description="Clip the ratio pi / pi_old from above at 1 + ratio_clip_max.")
    ] = 0.2
    ratio_clip_c: Annotated[
        Float | None,
        LIVE,
        Field(gt=1, description="Dual clip: upper bound of the ratio where the advantage is negative. null: unbounded."),
    ] = None
    disable_ppo_ratio: Annotated[
        Bool, Field(description="REINFORCE: use advantage * log pi in place of the clipped ratio.")
    ] = False
    force_on_policy_ratio: Annotated[
        Bool, Field(description="Use pi as pi_old, which saves a forward pass. Needs one update per step.")
    ] = False
    use_generation_logprobs: Annotated[
        Bool,
        Field(
            description="Use the engines' log-probs as the log-probs of pi_old, which saves a forward pass over the step's"
            " samples. The clipped ratio then also corrects for older weights and different rounding in the engines, so there"
            " are no other importance weights. Metrics of the mismatch compare the engines with the current policy."
        ),
    ] = False
    use_cispo: Annotated[Bool, Field(description="CISPO's loss: clipped ratios, without a gradient, weight log pi.")] = False
    sequence_level_importance_ratios: Annotated[
        Bool, Field(description="GSPO: use one ratio for a whole sequence. Needs token_level_loss=false.")
    ] = False
    token_level_loss: Annotated[
        Bool,
        Field(description="true: mean over all tokens. false: mean over the tokens of each sequence, then over sequences."),
    ] = True
    entropy_coeff: Annotated[
        Float, LIVE, Field(ge=0, description="Weight of the entropy, which is subtracted from the loss.")
    ] = 0.0
    log_entropy: Annotated[
        Bool, Field(description="Log the exact entropy. false: log only `approx_entropy`, an estimate from the samples.")
    ] = False
    use_importance_sampling_correction: Annotated[
        Bool,
        Field(
            description="Weight tokens by pi_old / pi_generate, which corrects for older weights and different rounding"
            " in the engines."
        ),
    ] = False
    truncated_importance_sampling_type: Annotated[
        Literal["tis", "icepop", "seq-mask-tis"] | None,
        Field(description="How to bound the weights pi_old / pi_generate. null: unbounded."),
    ] = None
    truncated_importance_sampling_ratio: Annotated[
        Float | None, Field(gt=0, description="Upper bound of the weights pi_old / pi_generate.")
    ] = None
    truncated_importance_sampling_ratio_min: Annotated[
        Float | None, Field(description="Lower bound of the weights pi_old / pi_generate.")
    ] = None
    kl_type: Annotated[Literal["forward", "reverse", "mixed"], Field(description="Divergence between teacher and policy.")] = (
        "mixed"
    )
    mixed_kl_weight: Annotated[
        Float, LIVE, Field(ge=0, le=1, description="kl_type=mixed: weight of the forward divergence.")
    ] = 0.5
    zero_outside_topk: Annotated[
        Bool, Field(description="Renormalize only the teacher over its top k tokens. false: renormalize the policy too.")
    ] = False


@dataclass
class ValueLossConfig:
    """The critic's loss."""

    scale: Annotated[Float, LIVE, Field(ge=0, description="Weight of the critic's loss.")] = 1.0
    cliprange: Annotated[
        Float | None, LIVE, Field(gt=0, description="Bound on the change of a value within a step. null: unbounded.")
    ] = 0.2
