"""The recipe's section of asynchronous generation, which runs ahead of training, and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.recipe.problems import Problem
from pipeline.recipe.values import Bool, Float, NotNegative

if TYPE_CHECKING:
    from pipeline.config import Recipe


@dataclass
class AsyncConfig:
    """Asynchronous generation: it runs ahead of training.

    The age of a rollout is the step that trains on it minus the version of the weights that started it.
    """

    enabled: Bool = False
    """Let generation run ahead of training."""
    max_trajectory_age_steps: NotNegative = 1
    """Maximum age of a rollout, in steps. 0: the synchronous algorithm."""
    in_flight_weight_updates: Bool = False
    """Refit without waiting for unfinished rollouts. They continue with the new weights."""
    recompute_kv_cache_after_weight_updates: Bool = False
    """Recompute the KV cache of unfinished rollouts after a refit. false: keep the old keys and values."""
    stragglers: Literal["wait", "keep", "cut"] = "wait"
    """wait: train on the oldest prompts. keep: train on the oldest complete prompts; sampling runs half as far ahead, so half
    of the maximum age remains for unfinished prompts. cut: train on the oldest prompts and truncate the last straggler_share of
    their answers."""
    straggler_share: Annotated[Float, Field(ge=0, le=1)] = 0.05
    """stragglers=cut: share of a step's answers that may be truncated."""
    max_generation_failures: NotNegative = 10
    """Number of consecutive groups whose episodes may all fail. One more ends the run. This key also applies while `enabled` is
    false."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether engines sample at the same time as the train ranks learn."""
        return self.enabled and self.max_trajectory_age_steps > 0


def settings_in(section: object) -> tuple[str, AsyncConfig] | None:
    """Return (field, settings) of asynchronous generation in an algorithm's section; None if the algorithm cannot run ahead."""
    return next(((name, value) for name, value in vars(section).items() if isinstance(value, AsyncConfig)), None)


def key_in(section: object, name: str) -> str:
    """Return the key of the settings of asynchronous generation in an algorithm's section, such as grpo.async_grpo.

    name: the algorithm's name. If the algorithm cannot run ahead, the key that the settings would have.
    """
    field, _ = settings_in(section) or (f"async_{name}", None)
    return f"{name}.{field}"


def settings(recipe: Recipe) -> AsyncConfig | None:
    """Return the settings of asynchronous generation of the recipe's algorithm; None if the algorithm cannot run ahead."""
    _, config = settings_in(getattr(recipe, recipe.algorithm)) or ("", None)
    return config


def problems(recipe: Recipe, name: str) -> Iterator[Problem]:
    """Yield contradictions between the section, if it is enabled, and the rest of the recipe. name: the algorithm's name."""
    section, config = getattr(recipe, name), settings(recipe)
    key = key_in(section, name)
    if config is None or not config.enabled:
        return
    age, share, prompts, ahead = (
        config.max_trajectory_age_steps,
        config.straggler_share,
        section.num_prompts_per_step,
        config.runs_ahead,
    )
    loss = recipe.loss_fn
    if ahead and not (loss.use_importance_sampling_correction or loss.use_generation_logprobs):
        message = (
            f"got false; expected true with {key}.max_trajectory_age_steps={age}, since the weights that sampled a rollout"
            f" can be {age} steps older than the policy. Try true, loss_fn.use_generation_logprobs=true, or {key}.enabled=false"
        )
        yield Problem("loss_fn.use_importance_sampling_correction", "contradiction", message)
    if ahead and recipe.policy.generation.colocated.enabled:
        message = (
            f"got {age}; expected 0 with policy.generation.colocated.enabled=true, since engines and train ranks then use the"
            f" same GPUs in turn. Try {key}.enabled=false (recipes whose names end in _sync have it), or"
            " policy.generation.colocated.enabled=false"
        )
        yield Problem(f"{key}.max_trajectory_age_steps", "contradiction", message)
    if section.use_dynamic_sampling and not ahead:
        message = f"got 0, with which dynamic sampling samples whole batches; expected at least 1. Try {key}.enabled=false"
        yield Problem(f"{key}.max_trajectory_age_steps", "too-small", message)
    if section.batch_multiplier != 1:
        message = f"got {section.batch_multiplier}; expected 1 with {key}.enabled=true, where groups are replaced one by one"
        yield Problem(f"{name}.batch_multiplier", "has-no-effect", message)
    if config.recompute_kv_cache_after_weight_updates and not config.in_flight_weight_updates:
        message = f"got true; expected false with {key}.in_flight_weight_updates=false, as all rollouts are finished at a refit"
        yield Problem(f"{key}.recompute_kv_cache_after_weight_updates", "has-no-effect", message)
    yield from _stragglers(config, key, name, share * prompts, prompts)


def _stragglers(config: AsyncConfig, key: str, name: str, groups: float, prompts: int) -> Iterator[Problem]:
    """Yield problems of stragglers=cut. groups: the number of a step's groups that may be cut. prompts: a step's groups."""
    if config.stragglers != "cut":
        return
    if not config.runs_ahead:
        message = f"got cut; expected wait with {key}.max_trajectory_age_steps=0, which has no stragglers. Try an age above 0"
        yield Problem(f"{key}.stragglers", "has-no-effect", message)
    if groups < 1:
        message = (
            f"got {config.straggler_share}, less than one group of {name}.num_prompts_per_step={prompts}; expected at least"
            f" {1 / prompts:.3g}. Try {key}.stragglers=wait"
        )
        yield Problem(f"{key}.straggler_share", "too-small", message)
