"""Translate `async_rl`, the section of NeMo-RL's single controller, into `grpo.async_grpo`.

The single controller's samplers select rollouts up to an age, as Hetstep does. Some select complete rollouts first, so a note
says which rollouts Hetstep selects. An age is a limit: a loss that does not correct for older weights gets age 0, with a note.
The controller updates weights in flight. Its streaming trainer accumulates the gradients of a step while rollouts are under
way, which changes no result.
"""

from __future__ import annotations

from launch.recipes.translation.rules import Done, Ignored, Only, apply, under
from launch.recipes.translation.translator import Translator

KEY = "async_rl"
OURS = "grpo.async_grpo"
AGES = {  # sampler -> (its key of the age, what it selects)
    "in_order": ("max_lookahead_versions", "does so too"),
    "weight_fifo": ("max_staleness_versions", "does so too, by the weights that began them"),
    "windowed": ("max_staleness_versions", "trains on the prompts that are complete first, and drops older prompts"),
    "ready_first": ("max_staleness_versions", "trains on the prompts that are complete first, of any age"),
}
RULES = under(
    KEY,
    (
        Done("sampler.name sampler.max_lookahead_versions sampler.max_staleness_versions sampler.sample_freshest_first"),
        Done("recompute_kv_cache_after_weight_updates rollout_failure.max_consecutive_dropped_prompts"),
        Only("rollout_failure.max_skipped_prompts", (0,), "a run that continues without some prompts", "0"),
        Ignored(
            "min_groups_for_streaming_train max_inflight_prompts max_buffered_rollouts",
            "engines take all prompts of the allowed age; a step's gradients do not depend on it",
        ),
        Ignored("diagnostics"),
        Ignored(
            "rollout_failure.* stall_watchdog.* generation_fleet_health.* generation_router.*",
            "the job has a watchdog, and repeats an engine's failed work on another engine",
        ),
    ),
)


def translate(t: Translator) -> None:
    """Translate `async_rl` if the recipe has it. Then `grpo.async_grpo` must be null, because `async_rl` replaces it."""
    if t.get(KEY) is None:
        t.consume(KEY)
        return
    if t.get(OURS) is not None:
        t.problem(OURS, "contradiction", f"got a section besides {KEY}. Try null, since the single controller reads {KEY}")
        t.consume(OURS)
    name = t.get(f"{KEY}.sampler.name", "in_order")
    if name in AGES:
        _age(t, name)
    else:
        t.lacks(f"{KEY}.sampler.name", name, "a user-defined sampler", f"one of: {', '.join(AGES)}")
        t.consume(f"{KEY}.sampler")
    apply(t, RULES)


def _age(t: Translator, name: str) -> None:
    key, selects = AGES[name]
    age_key = f"{KEY}.sampler.{key}"
    age = t.get(age_key, 1)
    if age != 0 and not t.get("loss_fn.use_importance_sampling_correction"):
        t.put(f"{OURS}.enabled", False, age_key)
        message = "0, since the loss does not correct for older weights; NeMo-RL takes older answers for new"
        t.change(f"{age_key}={age}", message)
        return
    t.put(f"{OURS}.enabled", age != 0, age_key)  # our schema judges what is no whole number
    text = f"{OURS}.max_trajectory_age_steps={age}"
    if age == 0:
        t.change(f"{KEY}.sampler.name={name}", f"{text}, the synchronous algorithm")
        return
    t.change(f"{KEY}.sampler.name={name}", f"{text}; a step trains on the oldest prompts, and NeMo-RL {selects}")
    failures_key = f"{KEY}.rollout_failure.max_consecutive_dropped_prompts"
    recompute_key = f"{KEY}.recompute_kv_cache_after_weight_updates"
    t.put(f"{OURS}.max_trajectory_age_steps", age, age_key)
    t.put(f"{OURS}.in_flight_weight_updates", True, KEY)
    t.put(f"{OURS}.recompute_kv_cache_after_weight_updates", t.get(recompute_key, False), recompute_key)
    t.put(f"{OURS}.max_generation_failures", t.get(failures_key, 0), failures_key)
