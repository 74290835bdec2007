"""What `grpo.async_grpo` says against itself and the rest of a recipe. Contradictions are looked for only while it is on."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.layout import colocated
from pipeline.config.schema import Recipe, runs_ahead

KEY = "grpo.async_grpo"


def check_async(recipe: Recipe) -> Iterator[str]:
    """A problem for each contradiction."""
    if recipe.algorithm == "grpo" and recipe.grpo.async_grpo.enabled:
        yield from (f"{key}: {message}" for wrong, key, message in _findings(recipe) if wrong)


def _findings(recipe: Recipe) -> Iterator[tuple[bool, str, str]]:
    """(whether it is so, the key, what is wrong and what would be right)"""
    grpo, config = recipe.grpo, recipe.grpo.async_grpo
    ahead = runs_ahead(recipe)
    yield (
        ahead and not recipe.loss_fn.use_importance_sampling_correction,
        "loss_fn.use_importance_sampling_correction",
        f"false, but with {KEY}.max_trajectory_age_steps={config.max_trajectory_age_steps} a step trains on what weights up to"
        f" {config.max_trajectory_age_steps} steps older have sampled, as if its own had; true, or {KEY}.enabled=false",
    )
    yield (
        ahead and colocated(recipe),
        f"{KEY}.max_trajectory_age_steps",
        f"{config.max_trajectory_age_steps} lets engines sample while others train, and with"
        f" policy.generation.colocated.enabled=true they have the same GPUs in turn; try {KEY}.enabled=false (recipes whose"
        " names end in _sync have it), or policy.generation.colocated.enabled=false",
    )
    yield (
        grpo.use_dynamic_sampling and not ahead,
        f"{KEY}.max_trajectory_age_steps",
        "0 is the synchronous algorithm, which samples whole batches anew where grpo.use_dynamic_sampling=true; at least 1, or"
        f" {KEY}.enabled=false",
    )
    yield (
        grpo.batch_multiplier != 1,
        "grpo.batch_multiplier",
        f"{grpo.batch_multiplier}, but with {KEY}.enabled=true there are no batches: each group that is passed over is replaced"
        " by one other; 1",
    )
    yield (
        config.recompute_kv_cache_after_weight_updates and not config.in_flight_weight_updates,
        f"{KEY}.recompute_kv_cache_after_weight_updates",
        f"true, but without {KEY}.in_flight_weight_updates nothing is under way when the weights change; that too, or false"
        " here",
    )
    yield (
        config.stragglers == "cut" and not ahead,
        f"{KEY}.stragglers",
        f"cut, but {KEY}.max_trajectory_age_steps=0 is the synchronous algorithm, which cuts nothing; wait, or an age above 0",
    )
    yield (
        config.stragglers == "cut" and config.straggler_share * grpo.num_prompts_per_step < 1,
        f"{KEY}.straggler_share",
        f"{config.straggler_share} of grpo.num_prompts_per_step={grpo.num_prompts_per_step} is less than one group, so that"
        f" nothing would ever be cut; at least {1 / grpo.num_prompts_per_step:.3g}, or {KEY}.stragglers=wait",
    )
