"""Translate the algorithm's section and the losses. DEFAULTS holds NeMo-RL's defaults that differ from ours."""

from __future__ import annotations

from typing import Any

from launch.recipes.nemo_rl import single_controller
from launch.recipes.nemo_rl.logger_keys import METRICS
from launch.recipes.translation.rules import Done, Ignored, Only, Rule, Same, apply, if_set, under
from launch.recipes.translation.translator import Translator, as_yaml
from pipeline.algorithms import OFFLINE
from pipeline.algorithms.sections import UNBOUNDED

NAMES = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")

DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {"max_num_steps": 1_000_000, "max_num_epochs": 1, "val_period": 10},
    "ppo": {"num_generations_per_prompt": 16, "max_num_steps": 100_000, "max_num_epochs": 100_000, "val_period": 20}
    | {"val_at_start": True, "ppo_epochs": 4},
    "distillation": {"max_num_epochs": 10, "val_period": 20},
    "sft": {"max_num_epochs": 1, "val_period": 10, "val_at_start": True},
    "dpo": {"max_num_steps": 150, "max_num_epochs": 1, "val_period": 25, "val_at_start": True, "sft_average_log_probs": False},
    "rm": {"max_num_steps": UNBOUNDED, "max_num_epochs": 1, "val_period": 16},
}
VALIDATED = {"grpo": (256, 256), "ppo": (256, 256), "distillation": (512, 64)}
"""Algorithm -> NeMo-RL's defaults of (max_val_samples, val_batch_size)."""
VALIDATED_BATCHES = {"sft": (8, 32), "dpo": (8, 8), "rm": (-1, 32)}
"""Algorithm -> NeMo-RL's defaults of (val_batches, val_global_batch_size)."""
BASELINE = ("normalize_rewards", "use_leave_one_out_baseline")
"""Keys of `grpo` that NeMo-RL reads in grpo.adv_estimator, true by default."""
KL_CLAMPS = {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}
"""NeMo-RL's defaults in loss_fn. NeMo-RL always uses these values for KL in the reward."""
PENALTY, PENALTY_DEFAULT = "loss_fn.reference_policy_kl_penalty", 0.01

REWARD_PENALTIES = "penalties on the form of reasoning"
ADVANTAGES = {
    "raw_reward": ("this estimator of advantages", "gae"),
}


def to_bound(value: int | None) -> int | None:
    """Return the bound that max_num_steps or max_num_epochs sets; a value that is not positive means no bound."""
    return value if value is None or value > 0 else UNBOUNDED


COMMON: tuple[Rule, ...] = (
    Same("val_at_start val_at_end seed"),
    Same("max_num_steps max_num_epochs", to_bound),
    Same("val_period", lambda period: max(0, period or 0)),  # -1 also means never
)
OFFLINE_COMMON = (*COMMON, Ignored("val_micro_batch_size"))
SAMPLED = (
    Same("num_prompts_per_step num_generations_per_prompt max_rollout_turns val_num_generations_per_prompt"),
    Only("val_start_at", (-1, 0, None), "a first step of validation", "-1, and val_period by launch/steer.py"),
    Done("stop_at_validation_metric stop_at_validation_threshold"),
)
REWARDED = (
    Same("use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier overlong_filtering"),
    Same("seq_logprob_error_threshold reward_scaling.*"),
    Same(
        "reward_shaping.enabled reward_shaping.overlong_buffer_length reward_shaping.overlong_buffer_penalty"
        " reward_shaping.max_response_length reward_shaping.stop_properly_penalty_coef",
        if_set,
    ),
    Ignored("calculate_advantages_on_gpu debug_payload_metrics"),
    Only("deduplicate_multimodal_data", (False, None), "images, sound or video"),
)
AHEAD = (
    Same("enabled max_trajectory_age_steps in_flight_weight_updates recompute_kv_cache_after_weight_updates"),
    Same("max_generation_failures"),
)
GRPO = (
    *under("async_grpo", AHEAD),
    Same("advantage_clip_low advantage_clip_high adv_estimator.name adv_estimator.minus_baseline"),
    Done("normalize_rewards use_leave_one_out_baseline"),
    Done("adv_estimator.normalize_rewards adv_estimator.use_leave_one_out_baseline adv_estimator.reward_weights"),
    Same("invalid_tool_call_advantage", if_set),
    Only("malformed_thinking_advantage penalize_*", (None, False), REWARD_PENALTIES),
)
PPO = (
    Same("ppo_epochs policy_training_start_step adv_estimator.*"),
    *under("async_ppo", AHEAD),
    Ignored(
        "async_ppo.warmup_generation_lead_steps",
        "sampling runs no further ahead while the policy is frozen, since its weights do not change",
    ),
    Ignored(
        "async_ppo.drop_incomplete_targets_on_restore",
        "a checkpoint keeps incomplete groups, and the restored run completes them",
    ),
)
DPO = (
    Same("reference_policy_kl_penalty preference_average_log_probs sft_average_log_probs preference_loss_weight"),
    Same("sft_loss_weight"),
)
SECTIONS = {
    "grpo": (*COMMON, *SAMPLED, *REWARDED, *GRPO),
    "ppo": (*COMMON, *SAMPLED, *REWARDED, *PPO),
    "distillation": (*COMMON, *SAMPLED, Same("topk_logits_k")),
    "sft": (*OFFLINE_COMMON, Only("only_unmask_final", (False, None), "a loss on the last turn alone", "false")),
    "dpo": (*OFFLINE_COMMON, *DPO),
    "rm": OFFLINE_COMMON,
}

POLICY_LOSS = under(
    "loss_fn",
    (
        Same("reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value"),
        Same("use_kl_in_reward use_on_policy_kl_approximation ratio_clip_min ratio_clip_max ratio_clip_c disable_ppo_ratio"),
        Same("force_on_policy_ratio use_cispo sequence_level_importance_ratios token_level_loss"),
        Same("use_importance_sampling_correction truncated_importance_sampling_type truncated_importance_sampling_ratio"),
        Same("truncated_importance_sampling_ratio_min"),
        Only("positive_example_nll_weight", (0, None), "a likelihood term on right answers", "0"),
    ),
)
LOSSES: dict[str, tuple[Rule, ...]] = {
    "grpo": (
        *POLICY_LOSS,
        Only("reward_penalties.penalize_*", (False, None), REWARD_PENALTIES, "false"),
        Ignored("reward_penalties.token_ids.*"),
    ),
    "ppo": (
        *POLICY_LOSS,
        Same("value_loss_fn.scale"),
        Same("value_loss_fn.cliprange", lambda bound: bound or None),  # 0 in NeMo-RL: no bound
    ),
    "distillation": (Same("loss_fn.kl_type loss_fn.mixed_kl_weight loss_fn.zero_outside_topk"),),
}


def algorithm_name(t: Translator) -> str | None:
    """Return the algorithm whose section the recipe has; None if it has none.

    Sections of other algorithms may be null; a second one with values is a problem.
    """
    sections = [name for name in NAMES if t.get(name) is not None]
    for section in (name for name in NAMES if name not in sections[:1]):
        t.consume(section)
    if len(sections) > 1:
        t.problem(
            sections[1],
            "contradiction",
            f"got a section besides the section {sections[0]}; expected one algorithm. Try null for all other algorithms",
        )
    return sections[0] if sections else None


def translate(t: Translator, algorithm: str, validates: bool) -> None:
    """Translate the algorithm's section and the losses. validates: whether the recipe has validation data."""
    defaults = DEFAULTS[algorithm]
    _max_val_samples(t, algorithm)
    if algorithm in OFFLINE and not validates:  # NeMo-RL ignores these two then
        for name in ("val_at_start", "val_at_end"):
            t.consume(f"{algorithm}.{name}")
            t.put(f"{algorithm}.{name}", False)
        defaults = {name: value for name, value in defaults.items() if name != "val_at_start"}
    t.put_defaults({f"{algorithm}.{name}": value for name, value in defaults.items()}, algorithm)
    if algorithm == "ppo":
        t.put_defaults({"value_loss_fn.cliprange": None}, algorithm)
        if epochs(t, algorithm) > 1:
            # NeMo-RL calls train() once per epoch, which advances the schedules: nemo_rl/algorithms/ppo.py, "total ticks".
            t.put("ppo.schedule_every_epoch", True, "ppo.ppo_epochs")
        _async(t, "ppo.async_ppo")
    if algorithm not in OFFLINE:
        _early_stop(t, algorithm)
    if algorithm in ("grpo", "ppo"):
        _rewards(t, algorithm)
        _differences(t, algorithm)
    if algorithm == "grpo":
        single_controller.translate(t)
        for name in BASELINE:
            t.put(f"grpo.{name}", t.get(f"grpo.adv_estimator.{name}", True), f"grpo.adv_estimator.{name}")
        _async(t, "grpo.async_grpo")
    apply(t, (*under(algorithm, SECTIONS[algorithm]), *LOSSES.get(algorithm, ())))


def epochs(t: Translator, algorithm: str) -> int:
    """Return the number of passes over the samples of a step. NeMo-RL's PPO advances the schedules after each pass."""
    count = t.get("ppo.ppo_epochs", DEFAULTS["ppo"]["ppo_epochs"]) if algorithm == "ppo" else 1
    return count or 1  # null: the schema refuses it


def max_num_steps(t: Translator, algorithm: str) -> int | None:
    """Return max_num_steps in Hetstep's form; None if neither the recipe nor NeMo-RL's defaults have a value."""
    return to_bound(t.get(f"{algorithm}.max_num_steps", DEFAULTS[algorithm].get("max_num_steps")))


def _max_val_samples(t: Translator, algorithm: str) -> None:
    """Translate the number of validation samples, which GRPO and PPO round down to whole batches, as NeMo-RL does.

    Distillation rounds it up.
    """
    if algorithm in OFFLINE:
        name, (number, batch) = "val_batches", VALIDATED_BATCHES[algorithm]
        batches = _whole(t, f"{algorithm}.val_batches", number)
        size = _whole(t, f"{algorithm}.val_global_batch_size", batch)
        samples = batches * size if batches > 0 else UNBOUNDED
    else:
        name, (number, batch) = "max_val_samples", VALIDATED[algorithm]
        keys = {f"{algorithm}.max_val_samples": number, f"{algorithm}.val_batch_size": batch}
        samples, size = (t.consume(key, default) for key, default in keys.items())
        if samples is None or not size:
            samples = UNBOUNDED  # all samples, as for NeMo Gym
        else:
            samples, size = (_whole(t, key, default) for key, default in keys.items())
            samples = (samples + (size - 1) * (algorithm == "distillation")) // size * size
    t.put(f"{algorithm}.max_val_samples", samples, f"{algorithm}.{name}")


def _early_stop(t: Translator, algorithm: str) -> None:
    """Translate the metric that stops a run, and its threshold, which has no effect without a metric.

    k of the metric pass_k is the number of all answers to a prompt.
    """
    key, threshold = f"{algorithm}.stop_at_validation_metric", f"{algorithm}.stop_at_validation_threshold"
    metric, bound = t.consume(key), t.consume(threshold)
    if metric is None:
        return
    answers = t.get(f"{algorithm}.val_num_generations_per_prompt", 1)
    name = f"pass@{answers}" if metric == "pass_k" else metric
    t.put(key, METRICS.get(f"val:{name}", f"val:{name}"))
    t.put(threshold, bound)


def _whole(t: Translator, key: str, default: int) -> int:
    """Consume and return a whole number that the schema does not check.

    For another value, add a problem and return the default.
    """
    value = t.consume(key, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    t.problem(key, "wrong-type", f"got {as_yaml(value)}; expected a whole number")
    return default


def _async(t: Translator, section: str) -> None:
    """Translate the keys of a section of asynchronous generation for which the tables have no rules."""
    t.consume_off(section)
    if not t.on(f"{section}.enabled"):
        return
    if t.get("policy.generation.colocated.enabled") and (age := t.get(f"{section}.max_trajectory_age_steps")) != 0:
        t.consume(section)
        t.put(f"{section}.enabled", False, section)
        message = "0: engines and train ranks take turns on their GPUs, so the policy's current weights sample all answers"
        t.change(f"{section}.max_trajectory_age_steps={age}", message)
        return
    t.put_defaults({f"{section}.max_generation_failures": 0}, section)
    message = "counts consecutive groups whose episodes all failed; NeMo-RL counts consecutive batches with any failure"
    t.change(f"{section}.max_generation_failures", message)
    if not t.on(f"{section}.in_flight_weight_updates"):  # NeMo-RL ignores it then
        t.consume(f"{section}.recompute_kv_cache_after_weight_updates")


def _rewards(t: Translator, algorithm: str) -> None:
    t.put_defaults({PENALTY: PENALTY_DEFAULT}, algorithm)
    estimator = f"{algorithm}.adv_estimator.name"
    if (name := t.get(estimator)) in ADVANTAGES:
        t.lacks(estimator, name, *ADVANTAGES[name])
        t.consume(f"{algorithm}.adv_estimator")
    t.consume_off(f"{algorithm}.reward_shaping", f"{algorithm}.reward_scaling")
    if t.get("loss_fn.truncated_importance_sampling_type") is None:  # the bounds have no effect then
        for bound in ("ratio", "ratio_min"):
            t.consume(f"loss_fn.truncated_importance_sampling_{bound}")
    skip = f"{algorithm}.skip_reference_policy_logprobs_calculation"
    if t.consume(skip, algorithm == "ppo") is True and t.get(PENALTY, PENALTY_DEFAULT):
        default = "" if t.has(skip) else " by default"
        t.problem(
            skip,
            "contradiction",
            f"got true{default}, but {PENALTY} needs the reference's log-probs. Try false, or a penalty of 0",
        )


def _differences(t: Translator, algorithm: str) -> None:
    """Add notes on computations of GRPO and PPO that differ from NeMo-RL's."""
    shaping, estimator = f"{algorithm}.reward_shaping", t.get(f"{algorithm}.adv_estimator.name")
    shapes, kl = t.on(f"{shaping}.enabled"), t.on("loss_fn.use_kl_in_reward")
    stops = shapes and t.get(f"{shaping}.stop_properly_penalty_coef") is not None
    keeps = t.on("grpo.use_dynamic_sampling") and t.get("grpo.use_leave_one_out_baseline", True)
    cut = (
        "an answer is cut if its last turn reached the length limit; in NeMo-RL also if another turn reached it, or"
        " if the reply to the answer does not fit"
    )
    message = [
        (
            t.on("ppo.use_dynamic_sampling"),
            "ppo.use_dynamic_sampling",
            "groups whose rewards do not vary are sampled again; NeMo-RL trains on them",
        ),
        (
            keeps,
            "grpo.use_dynamic_sampling",
            "a group is kept whole if its rewards vary; with grpo.use_leave_one_out_baseline=true NeMo-RL drops the one"
            " answer that differs from all others",
        ),
        (
            t.on("grpo.use_dynamic_sampling") and estimator == "gdpo",
            "grpo.use_dynamic_sampling",
            "a group is kept if one of its rewards varies; in NeMo-RL if their sum does",
        ),
        (
            shapes and not stops and t.get(f"{algorithm}.max_rollout_turns", 1) > 1,
            f"{shaping}.overlong_buffer_length",
            "counts the tokens of all turns; NeMo-RL counts those of the first",
        ),
        (
            t.get("grpo.invalid_tool_call_advantage") is not None,
            "grpo.invalid_tool_call_advantage",
            "the environment says which turns are malformed; in NeMo-RL it is the text of a call that was not parsed",
        ),
        (stops, f"{shaping}.stop_properly_penalty_coef", cut),
        (t.on(f"{algorithm}.overlong_filtering"), f"{algorithm}.overlong_filtering", cut),
        (
            kl and algorithm == "grpo" and estimator == "reinforce_plus_plus",
            "loss_fn.use_kl_in_reward",
            "a token's return has the KL of all tokens from it to the end of the answer, as in the paper; in NeMo-RL only its"
            " own KL",
        ),
    ]
    for name, always in KL_CLAMPS.items():
        clamp = t.get(f"loss_fn.{name}", always)
        bounds = f"bounds the KL in the reward too, which NeMo-RL always bounds by {always:g}"
        message.append((kl and clamp != always, f"loss_fn.{name}={as_yaml(clamp)}", bounds))
    for name in BASELINE:
        key = f"grpo.adv_estimator.{name}"
        top, used = t.get(f"grpo.{name}", True), t.get(key, True)
        differs = algorithm == "grpo" and (estimator or "grpo") in ("grpo", "gdpo") and top != used
        message.append((differs, f"grpo.{name}={as_yaml(top)}", f"advantages follow {key}={as_yaml(used)}, as in NeMo-RL"))
    for applies, key, text in message:
        if applies:
            t.change(key, text)
