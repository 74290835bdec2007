"""The algorithm's own section, and its losses.

`THEIR_DEFAULTS` are those that differ from ours: a key that they leave out gets them.
"""

from __future__ import annotations

from typing import Any

from launch.nemo_rl import rewards
from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Only, Switch, apply, ignored, same, under
from pipeline.algorithms.sections import UNBOUNDED

NAMES = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")

ASYNC = (
    "enabled",
    "max_trajectory_age_steps",
    "in_flight_weight_updates",
    "recompute_kv_cache_after_weight_updates",
    "max_generation_failures",
)

THEIR_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {"max_num_steps": 1_000_000, "max_num_epochs": 1, "val_period": 10, "max_val_samples": 256, "val_batch_size": 256},
    "ppo": {
        "num_generations_per_prompt": 16,
        "max_num_steps": 100_000,
        "max_num_epochs": 100_000,
        "val_period": 20,
        "val_at_start": True,
        "max_val_samples": 256,
        "val_batch_size": 256,
        "ppo_epochs": 4,
    },
    "distillation": {"max_num_epochs": 10, "val_period": 20, "max_val_samples": 512, "val_batch_size": 64},
    "sft": {"max_num_epochs": 1, "val_period": 10, "val_at_start": True, "val_batches": 8, "val_global_batch_size": 32},
    "dpo": {
        "max_num_steps": 150,
        "max_num_epochs": 1,
        "val_period": 25,
        "val_at_start": True,
        "val_batches": 8,
        "val_global_batch_size": 8,
        "sft_average_log_probs": False,
    },
    "rm": {"max_num_steps": -1, "max_num_epochs": 1, "val_period": 16, "val_batches": -1, "val_global_batch_size": 32},
}
ASYNC_DEFAULTS = {"max_generation_failures": 0}
LOSS_DEFAULTS = {"loss_fn.reference_policy_kl_penalty": 0.01, "value_loss_fn.cliprange": None}

COMMON = (same("val_at_start", "val_at_end", "seed"),)

SAMPLED = (
    same("num_prompts_per_step", "num_generations_per_prompt", "max_rollout_turns", "val_num_generations_per_prompt"),
    Only(("val_start_at",), (-1, 0), Feature.DELAYED_VALIDATION, "-1"),
    Only(("stop_at_validation_metric",), (None,), Feature.EARLY_STOP, "null"),
    ignored("stop_at_validation_threshold"),
)

REWARDED = (
    same(
        "use_dynamic_sampling",
        "dynamic_sampling_max_gen_batches",
        "batch_multiplier",
        "overlong_filtering",
        "seq_logprob_error_threshold",
        "reward_scaling.*",
    ),
    ignored("calculate_advantages_on_gpu", "debug_payload_metrics"),
    Only(("deduplicate_multimodal_data",), (False, None), Feature.MULTIMODAL),
)

GRPO = (
    same(*(f"async_grpo.{name}" for name in ASYNC)),
    same("normalize_rewards", "use_leave_one_out_baseline", "advantage_clip_low", "advantage_clip_high"),
    same(
        "adv_estimator.name",
        "adv_estimator.normalize_rewards",
        "adv_estimator.use_leave_one_out_baseline",
        "adv_estimator.minus_baseline",
    ),
    Only(
        ("invalid_tool_call_*", "malformed_thinking_advantage", "penalize_*"),
        (None, False),
        Feature.REWARD_PENALTIES,
        "leave it out",
    ),
)

PPO = (
    Switch("async_ppo", Feature.ASYNC, "false: a step generates with the weights that the last one left"),
    same("ppo_epochs", "policy_training_start_step", "adv_estimator.*"),
)

SECTIONS = {
    "grpo": (*COMMON, *SAMPLED, *REWARDED, *GRPO),
    "ppo": (*COMMON, *SAMPLED, *REWARDED, *PPO),
    "distillation": (*COMMON, *SAMPLED, same("topk_logits_k")),
    "sft": (*COMMON, Only(("only_unmask_final",), (False, None), Feature.LAST_TURN_ONLY, "false")),
    "dpo": (
        *COMMON,
        same(
            "reference_policy_kl_penalty",
            "preference_average_log_probs",
            "sft_average_log_probs",
            "preference_loss_weight",
            "sft_loss_weight",
        ),
    ),
    "rm": COMMON,
}
OFFLINE_IGNORED = (ignored("val_micro_batch_size"),)

SHAPING = (
    "enabled",
    "overlong_buffer_length",
    "overlong_buffer_penalty",
    "max_response_length",
    "stop_properly_penalty_coef",
)

ESTIMATORS = {
    "gdpo": (Feature.SEVERAL_REWARDS, "grpo"),
    "opd": (Feature.SEVERAL_TEACHERS, "grpo, or the section distillation with one teacher"),
    "raw_reward": (Feature.ADVANTAGE, "gae"),
}

POLICY_LOSS = under(
    "loss_fn",
    (
        same(
            "reference_policy_kl_penalty",
            "reference_policy_kl_type",
            "kl_input_clamp_value",
            "kl_output_clamp_value",
            "use_kl_in_reward",
            "use_on_policy_kl_approximation",
            "ratio_clip_min",
            "ratio_clip_max",
            "ratio_clip_c",
            "disable_ppo_ratio",
            "force_on_policy_ratio",
            "use_cispo",
            "sequence_level_importance_ratios",
            "token_level_loss",
            "use_importance_sampling_correction",
            "truncated_importance_sampling_type",
            "truncated_importance_sampling_ratio",
            "truncated_importance_sampling_ratio_min",
        ),
        Only(("positive_example_nll_weight",), (0, None), Feature.POSITIVE_NLL, "0"),
    ),
)
VALUE_LOSS = under("value_loss_fn", (same("scale"),))
DISTILLATION_LOSS = under("loss_fn", (same("kl_type", "mixed_kl_weight", "zero_outside_topk"),))
REWARD_PENALTIES = under(
    "reward_penalties",
    (Only(("penalize_*",), (False, None), Feature.REWARD_PENALTIES, "false"), ignored("token_ids.*")),
)
LOSSES = {
    "grpo": (*POLICY_LOSS, *REWARD_PENALTIES),
    "ppo": (*POLICY_LOSS, *VALUE_LOSS),
    "distillation": DISTILLATION_LOSS,
}


def named(ledger: Ledger) -> str | None:
    """The algorithm, whose section a recipe has. Those of others may be there, and null."""
    given = [name for name in NAMES if ledger.get(name) is not None]
    for other in (name for name in NAMES if name not in given[:1]):
        ledger.take(other)
    if len(given) > 1:
        ledger.problem(given[1], f"a section, and so is {given[0]}; null for all but one of the algorithms")
    return given[0] if given else None


def translate(ledger: Ledger, algorithm: str, validates: bool) -> None:
    """validates: whether there is a data set to validate on."""
    defaults = THEIR_DEFAULTS[algorithm]
    samples = "val_batches" not in defaults
    _bounds(ledger, algorithm, defaults)
    _validation(ledger, algorithm, defaults, validates)
    for name in ("ppo_epochs", "num_generations_per_prompt", "sft_average_log_probs"):
        if name in defaults and not ledger.has(f"{algorithm}.{name}"):
            ledger.put(f"{algorithm}.{name}", defaults[name], algorithm)
    if algorithm == "ppo" and epochs(ledger, algorithm) > 1:
        # Theirs calls train() once per epoch, which advances the schedules: nemo_rl/algorithms/ppo.py, "total ticks".
        ledger.put("ppo.schedule_every_epoch", True, "ppo.ppo_epochs")
    if algorithm in ("grpo", "ppo"):
        _rewarded(ledger, algorithm)
        rewards.differences(ledger, algorithm)
    if algorithm == "grpo":
        rewards.advantages(ledger)
        _async(ledger)
    apply(ledger, under(algorithm, SECTIONS[algorithm] if samples else (*SECTIONS[algorithm], *OFFLINE_IGNORED)))
    apply(ledger, LOSSES.get(algorithm, ()))


def epochs(ledger: Ledger, algorithm: str) -> int:
    """Passes over the samples of a step; theirs advances the schedules after each."""
    return ledger.get("ppo.ppo_epochs", THEIR_DEFAULTS["ppo"]["ppo_epochs"]) if algorithm == "ppo" else 1


def _bounds(ledger: Ledger, algorithm: str, defaults: dict[str, Any]) -> None:
    for name in ("max_num_steps", "max_num_epochs"):
        key = f"{algorithm}.{name}"
        if ledger.has(key) or name in defaults:
            ledger.put(key, most(ledger, algorithm, name), key)
            ledger.take(key)


def most(ledger: Ledger, algorithm: str, name: str) -> int | None:
    """Of max_num_steps or max_num_epochs, as translated; None: nothing is said, also not by their default."""
    value = ledger.get(f"{algorithm}.{name}", THEIR_DEFAULTS[algorithm].get(name))
    return value if value is None or value > 0 else UNBOUNDED


def _validation(ledger: Ledger, algorithm: str, defaults: dict[str, Any], validates: bool) -> None:
    """There -1 is never, too; how many are looked at is said in batches, of which GRPO and PPO drop one that is not full."""
    key = algorithm
    period = ledger.take(f"{key}.val_period", defaults["val_period"])
    if "val_batches" in defaults:
        batches = ledger.take(f"{key}.val_batches", defaults["val_batches"])
        size = ledger.take(f"{key}.val_global_batch_size", defaults["val_global_batch_size"])
        ledger.put(f"{key}.max_val_samples", batches * size if batches > 0 else UNBOUNDED, f"{key}.val_batches")
        if not validates:  # these two are passed over then
            for name in ("val_at_start", "val_at_end"):
                ledger.take(f"{key}.{name}")
                ledger.put(f"{key}.{name}", False, f"{key}.{name}")
        elif defaults.get("val_at_start") and not ledger.has(f"{key}.val_at_start"):
            ledger.put(f"{key}.val_at_start", True, key)
    else:
        most = ledger.take(f"{key}.max_val_samples", defaults["max_val_samples"])
        size = ledger.take(f"{key}.val_batch_size", defaults["val_batch_size"])
        if most is None or not size:
            most = UNBOUNDED  # NeMo Gym's: all
        else:
            most = (most + size - 1) // size * size if algorithm == "distillation" else most // size * size
        ledger.put(f"{key}.max_val_samples", most, f"{key}.max_val_samples")
        if defaults.get("val_at_start") and not ledger.has(f"{key}.val_at_start"):
            ledger.put(f"{key}.val_at_start", True, key)
    ledger.put(f"{key}.val_period", max(0, period or 0), f"{key}.val_period")


def _async(ledger: Ledger) -> None:
    """A section that is off, or null, says nothing. There what cannot be used is passed over, too."""
    section, recompute = "grpo.async_grpo", "recompute_kv_cache_after_weight_updates"
    if ledger.get(f"{section}.enabled") is not True:
        ledger.take(section)
        return
    for name, value in ASYNC_DEFAULTS.items():
        if not ledger.has(f"{section}.{name}"):
            ledger.put(f"{section}.{name}", value, section)
    ledger.change(
        f"{section}.max_generation_failures",
        "counts groups in a row all of whose episodes failed; there batches in a row in which anything failed",
    )
    if ledger.get(f"{section}.in_flight_weight_updates") is not True:
        ledger.take(f"{section}.{recompute}")


def _rewarded(ledger: Ledger, algorithm: str) -> None:
    if algorithm == "ppo" and (bound := ledger.take("value_loss_fn.cliprange")) is not None:  # 0 there: no bound
        ledger.put("value_loss_fn.cliprange", bound or None, "value_loss_fn.cliprange")
    for key, value in LOSS_DEFAULTS.items():
        if not ledger.has(key) and (algorithm == "ppo" or key.startswith("loss_fn")):
            ledger.put(key, value, algorithm)
    estimator = f"{algorithm}.adv_estimator.name"
    if ledger.get(estimator) in ESTIMATORS:
        feature, instead = ESTIMATORS[ledger.get(estimator)]
        ledger.lacks(estimator, ledger.get(estimator), feature, instead)
        ledger.take(f"{algorithm}.adv_estimator")
    shaping = f"{algorithm}.reward_shaping"  # null there is not given; while disabled it says nothing
    for name in SHAPING if ledger.get(f"{shaping}.enabled") is True else ():
        if (value := ledger.get(f"{shaping}.{name}")) is not None:
            ledger.put(f"{shaping}.{name}", value, f"{shaping}.{name}")
    ledger.take_off(shaping, *SHAPING)
    if ledger.get(f"{algorithm}.reward_scaling.enabled") is not True:
        ledger.take(f"{algorithm}.reward_scaling")
    if ledger.get("loss_fn.truncated_importance_sampling_type") is None:  # the bounds say nothing then
        for name in ("ratio", "ratio_min"):
            ledger.take(f"loss_fn.truncated_importance_sampling_{name}")
    skip, penalty = f"{algorithm}.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"
    if ledger.take(skip, algorithm == "ppo") is True and ledger.get(penalty, LOSS_DEFAULTS[penalty]):
        ledger.problem(
            skip,
            f"true{'' if ledger.has(skip) else ' by default'}, but {penalty} needs the reference's log-probs; false, or 0",
        )
