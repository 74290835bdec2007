"""What the keys of the algorithms say against themselves and each other.

Keys that an algorithm never reads are not looked at. What a loss needs of the batch and the data set is checked too, as far as
the recipe alone can tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.algorithms import (
    PAIRED,
    DPOConfig,
    GAEConfig,
    GRPOConfig,
    LossConfig,
    PPOConfig,
    RewardedConfig,
)
from pipeline.config.data import keyed_sets
from pipeline.config.layout import named_backend
from pipeline.config.policy import LoRAConfig
from pipeline.config.schema import Recipe, generates, section
from pipeline.config.updates import epochs_per_step, updates_per_epoch

Finding = tuple[bool, str, str]
"""(whether it is so, the key, what is wrong and what would be right)"""


def check_algorithm(recipe: Recipe) -> Iterator[str]:
    """A problem for each contradiction."""
    if generates(recipe):
        yield from _check_online_batch(recipe)
    findings = (*_of_algorithm(recipe), *_of_lora(recipe, recipe.policy.dtensor_cfg.lora_cfg))
    if recipe.algorithm in PAIRED:
        findings += (*_of_pairs(recipe),)
    yield from (f"{key}: {message}" for wrong, key, message in findings if wrong)


def _of_algorithm(recipe: Recipe) -> Iterator[Finding]:
    match recipe.algorithm:
        case "grpo":
            yield from _of_rewarded("grpo", recipe.grpo)
            yield from _of_grpo(recipe.grpo, recipe.loss_fn)
            yield from _of_policy_loss(recipe, recipe.loss_fn)
        case "ppo":
            yield from _of_rewarded("ppo", recipe.ppo)
            yield from _of_gae(recipe.ppo.adv_estimator)
            yield from _of_ppo(recipe, recipe.ppo)
            yield from _of_policy_loss(recipe, recipe.loss_fn)
        case "distillation":
            yield from _of_distillation(recipe, recipe.loss_fn)
        case "dpo":
            yield from _of_dpo(recipe.dpo)


def _of_rewarded(name: str, config: RewardedConfig) -> Iterator[Finding]:
    scaling, shaping = config.reward_scaling, config.reward_shaping
    coefficient, key = shaping.stop_properly_penalty_coef, f"{name}.reward_shaping"
    yield (
        config.use_dynamic_sampling and config.num_generations_per_prompt < 2,
        f"{name}.use_dynamic_sampling",
        f"it keeps groups whose rewards vary, and {name}.num_generations_per_prompt is 1; at least 2, or false",
    )
    yield (
        config.batch_multiplier != 1 and not config.use_dynamic_sampling,
        f"{name}.batch_multiplier",
        f"{config.batch_multiplier} only means something with {name}.use_dynamic_sampling=true; that, or 1",
    )
    yield (
        scaling.enabled and scaling.source_min >= scaling.source_max,
        f"{name}.reward_scaling.source_min",
        f"{scaling.source_min} must be below {name}.reward_scaling.source_max {scaling.source_max}",
    )
    yield (
        shaping.enabled and coefficient is not None and not 0 <= coefficient <= 1,
        f"{key}.stop_properly_penalty_coef",
        f"{coefficient} is a factor on the reward of answers that were cut; it must be in [0, 1]",
    )
    yield (
        shaping.enabled and coefficient is not None and coefficient < 1 and scaling.enabled and scaling.target_min < 0,
        f"{key}.stop_properly_penalty_coef",
        f"{coefficient} makes the reward of a cut wrong answer larger than that of a wrong one, which"
        f" {name}.reward_scaling.target_min {scaling.target_min:g} makes negative; target_min 0, or 1 here",
    )
    yield (
        shaping.enabled and coefficient is None and shaping.overlong_buffer_length >= shaping.max_response_length,
        f"{key}.overlong_buffer_length",
        f"{shaping.overlong_buffer_length} tokens before {key}.max_response_length {shaping.max_response_length} leave no"
        " answer without a penalty; it must be below that",
    )


def _of_grpo(config: GRPOConfig, loss: LossConfig) -> Iterator[Finding]:
    grouped = config.adv_estimator.name == "grpo"
    low, high = config.advantage_clip_low, config.advantage_clip_high
    yield (
        grouped and config.num_generations_per_prompt < 2,
        "grpo.num_generations_per_prompt",
        "1 leaves nothing for a mean or a leave-one-out baseline, so that every advantage is 0; at least 2",
    )
    yield (
        not grouped and config.adv_estimator.minus_baseline and config.num_generations_per_prompt < 2,
        "grpo.num_generations_per_prompt",
        "1 is its own baseline, so that every advantage is 0; at least 2, or grpo.adv_estimator.minus_baseline=false",
    )
    yield (
        grouped and loss.use_kl_in_reward,
        "loss_fn.use_kl_in_reward",
        "grpo.adv_estimator.name=grpo has one advantage for a whole answer; name=reinforce_plus_plus, or algorithm ppo, has"
        " rewards of single tokens",
    )
    yield (
        low is not None and high is not None and low > high,
        "grpo.advantage_clip_low",
        f"{low} is above grpo.advantage_clip_high {high}",
    )


def _of_gae(config: GAEConfig) -> Iterator[Finding]:
    for key in ("gae_gamma", "gae_lambda", "gae_lambda_value", "gae_lambda_policy"):
        value = getattr(config, key)
        yield value is not None and not 0 <= value <= 1, f"ppo.adv_estimator.{key}", f"{value} must be in [0, 1]"
    yield (
        config.length_adaptive_alpha > 0 and config.gae_lambda_policy is not None,
        "ppo.adv_estimator.gae_lambda_policy",
        "length_adaptive_alpha above 0 makes a lambda of each answer's length; one of the two",
    )


def _of_ppo(recipe: Recipe, config: PPOConfig) -> Iterator[Finding]:
    cliprange = recipe.value_loss_fn.cliprange
    yield not recipe.value.model_name, "value.model_name", "ppo needs a critic; a model to begin it from"
    yield (
        config.policy_training_start_step >= config.max_num_steps > 0,
        "ppo.policy_training_start_step",
        f"{config.policy_training_start_step} leaves the policy no step to learn in; below ppo.max_num_steps"
        f" {config.max_num_steps}",
    )
    yield (
        cliprange is not None and cliprange <= 0,
        "value_loss_fn.cliprange",
        f"{cliprange} must be above 0; null for no clipping",
    )


def _of_policy_loss(recipe: Recipe, loss: LossConfig) -> Iterator[Finding]:
    yield (
        loss.sequence_level_importance_ratios and loss.token_level_loss,
        "loss_fn.sequence_level_importance_ratios",
        "a ratio of whole sequences goes with a mean over sequences; loss_fn.token_level_loss=false, or this false",
    )
    yield (
        loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1,
        "loss_fn.ratio_clip_c",
        f"{loss.ratio_clip_c} bounds ratios that grew; it must be above 1, or null",
    )
    yield (
        loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0,
        "loss_fn.use_kl_in_reward",
        "loss_fn.reference_policy_kl_penalty is 0, so that there is nothing to take off; above 0, or this false",
    )
    if loss.use_cispo:
        yield from _of_cispo(loss)
    if loss.force_on_policy_ratio:
        updates, epochs = updates_per_epoch(recipe), epochs_per_step(recipe)
        message = "after the first of them the policy is not the one that is taken to have sampled; "
        yield (
            updates > 1,
            "loss_fn.force_on_policy_ratio",
            f"a step has {updates} updates: {message}policy.train_global_batch_size={_samples(recipe)} makes it one",
        )
        yield (
            epochs > 1,
            "loss_fn.force_on_policy_ratio",
            f"ppo.ppo_epochs {epochs} makes as many updates: {message}1 epoch, or this false",
        )
    yield from _of_truncation(loss)


def _of_cispo(loss: LossConfig) -> Iterator[Finding]:
    for name, why in (
        ("disable_ppo_ratio", "needs the ratio that this takes away"),
        ("force_on_policy_ratio", "needs the ratio that this makes 1"),
        ("sequence_level_importance_ratios", "weighs every token by its own ratio"),
    ):
        yield getattr(loss, name), f"loss_fn.{name}", f"loss_fn.use_cispo {why}; one of the two"
    yield (
        loss.ratio_clip_c is not None,
        "loss_fn.ratio_clip_c",
        "loss_fn.use_cispo has no surrogate for a dual clip; null, or use_cispo=false",
    )
    yield (
        not loss.token_level_loss,
        "loss_fn.token_level_loss",
        "loss_fn.use_cispo is a mean over tokens; true, or use_cispo=false",
    )


def _of_truncation(loss: LossConfig) -> Iterator[Finding]:
    kind, key = loss.truncated_importance_sampling_type, "loss_fn.truncated_importance_sampling"
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    if kind is None:
        for name, value in (("ratio", high), ("ratio_min", low)):
            yield value is not None, f"{key}_{name}", f"{value} bounds nothing without {key}_type: tis, icepop or seq-mask-tis"
        return
    yield (
        not loss.use_importance_sampling_correction,
        f"{key}_type",
        f"{kind} bounds weights that loss_fn.use_importance_sampling_correction=false does not use; true, or null here",
    )
    yield high is None or high <= 0, f"{key}_ratio", f"{'null' if high is None else high}, but {kind} needs a bound above 0"
    yield kind != "tis" and low is None, f"{key}_ratio_min", f"null, but {kind} needs a lower bound too"
    yield low is not None and high is not None and low > high, f"{key}_ratio_min", f"{low} is above {key}_ratio {high}"
    yield (
        kind == "seq-mask-tis" and loss.sequence_level_importance_ratios,
        f"{key}_type",
        "seq-mask-tis leaves out sequences and weighs tokens, but loss_fn.sequence_level_importance_ratios=true weighs"
        " sequences; tis or icepop",
    )


def _of_distillation(recipe: Recipe, loss: LossConfig) -> Iterator[Finding]:
    yield recipe.teacher.model_name is None, "teacher.model_name", "distillation needs one; a folder or a Hugging Face name"
    yield (
        not 0 <= loss.mixed_kl_weight <= 1,
        "loss_fn.mixed_kl_weight",
        f"{loss.mixed_kl_weight} is the share of the forward divergence; it must be in [0, 1]",
    )


def _of_dpo(config: DPOConfig) -> Iterator[Finding]:
    beta, smoothing = config.reference_policy_kl_penalty, config.label_smoothing
    yield beta <= 0, "dpo.reference_policy_kl_penalty", f"{beta} is DPO's beta; it must be above 0"
    yield (
        not 0 <= smoothing < 0.5,
        "dpo.label_smoothing",
        f"{smoothing} is how often a label is wrong; it must be in [0, 0.5)",
    )
    yield (
        smoothing != 0 and config.preference_loss == "ipo",
        "dpo.label_smoothing",
        f"{smoothing} belongs to dpo.preference_loss=sigmoid; 0 with ipo",
    )
    yield (
        config.preference_loss_weight == 0 and config.sft_loss_weight == 0,
        "dpo.preference_loss_weight",
        "0, and dpo.sft_loss_weight too, leave nothing to learn; one of them above 0",
    )


def _of_lora(recipe: Recipe, lora: LoRAConfig) -> Iterator[Finding]:
    if not lora.enabled:
        return
    key = "policy.dtensor_cfg.lora_cfg"
    yield (
        named_backend(recipe.policy) == "megatron",
        f"{key}.enabled",
        "adapters are for FSDP2 only; policy.dtensor_cfg.enabled=true, or this false",
    )
    tensor = recipe.policy.dtensor_cfg.tensor_parallel_size
    yield (
        tensor > 1,
        f"{key}.enabled",
        f"adapters are not cut by tensor parallelism; policy.dtensor_cfg.tensor_parallel_size={tensor} must be 1",
    )
    yield (
        lora.match_all_linear and bool(lora.target_modules),
        f"{key}.target_modules",
        f"{key}.match_all_linear=true takes all linear layers; false, or no names here",
    )
    yield (
        not lora.match_all_linear and not lora.target_modules,
        f"{key}.target_modules",
        f"empty, and {key}.match_all_linear=false, so that nothing would be trained; names of layers, or true there",
    )


def _of_pairs(recipe: Recipe) -> Iterator[Finding]:
    """A pair is two sequences that go through the model together."""
    packing, longest = recipe.policy.sequence_packing, recipe.policy.max_total_sequence_length
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(packing, key)
        yield (
            packing.enabled and tokens < 2 * longest,
            f"policy.sequence_packing.{key}",
            f"{tokens} cannot hold the two sequences of a pair, of policy.max_total_sequence_length {longest} each; at least"
            f" {2 * longest}",
        )
    for name, dataset in keyed_sets(recipe.data).items():
        yield (
            dataset.chosen_key == dataset.rejected_key,
            f"{name}.rejected_key",
            f"'{dataset.rejected_key}' is {name}.chosen_key too, so that nothing is preferred",
        )
        yield (
            dataset.dataset_name == "scratchpad_addition",
            f"{name}.dataset_name",
            f"scratchpad_addition has no pairs, which {recipe.algorithm} learns from; scratchpad_preferences has",
        )


def _samples(recipe: Recipe) -> int:
    """Of a step of an algorithm that samples."""
    config = section(recipe)
    return config.num_prompts_per_step * config.num_generations_per_prompt


def _check_online_batch(recipe: Recipe) -> Iterator[str]:
    name, config, size = recipe.algorithm, section(recipe), recipe.policy.train_global_batch_size
    if (samples := _samples(recipe)) % size:
        yield (
            f"policy.train_global_batch_size: {size} does not divide the {samples} samples of a step"
            f" ({name}.num_prompts_per_step {config.num_prompts_per_step} x {name}.num_generations_per_prompt"
            f" {config.num_generations_per_prompt}); {samples} makes it one update per step"
        )
