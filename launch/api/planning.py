"""Plan a recipe, and return the figures of the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.api.overrides import Overrides, arguments, at_argument, naming_arguments
from launch.plan import evaluation, plan_table, variants
from launch.plan.estimate import Plan
from launch.plan.evaluation import EvaluationPlan
from launch.recipes.trust import Trust, trusting
from launch.submission.prepare import Prepared, examine
from pipeline.config import Problem, Recipe, RecipeError, uses_megatron


@dataclass(frozen=True)
class RunPlan:
    """The plan of a recipe. All figures are estimates; an unknown figure is None. `str()` is the text of the plan."""

    recipe: Recipe  # resolved, with the chosen train backend
    fits: bool  # whether there are neither problems nor warnings
    problems: Sequence[Problem]  # what keeps the recipe from running anywhere
    site_problems: Sequence[Problem]  # files, folders and services that a run lacks here
    warnings: Sequence[str]
    notes: Sequence[str]  # what could not be checked
    gpus: int
    backend: str | None  # megatron or fsdp2; None: nothing trains
    train_bytes: Mapping[str, float] | None  # of the fullest train rank's GPU, by part; None: nothing trains
    generate_bytes: Mapping[str, float] | None  # of a generate rank's GPU, by part; None: nothing samples
    kv_cache_tokens: float | None  # of an engine
    refit_seconds: float | None
    phase_seconds: Mapping[str, float]  # of a step, by phase; empty if the times are not known
    step_seconds: float | None
    steps: int | None  # None: the run ends with its data
    total_seconds: float | None
    gpu_hours: float | None
    submissions: int | None  # how often the run has to be submitted, with its time limit
    checkpoint_bytes: float | None
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def plan(
    recipe: str | os.PathLike[str],
    overrides: Overrides | None = None,
    /,
    *,
    plan_from: str | os.PathLike[str] | None = None,
    trust: bool = False,
    **keywords: Any,
) -> RunPlan:
    """Return the plan of a recipe: memory, seconds, GPU-hours. Writes nothing, and needs neither GPUs nor weights.

    Args:
        recipe: a name in recipes/, or a path to a YAML file.
        overrides: values by key, dotted or nested: `{"grpo.max_num_steps": 20}`.
        plan_from: the folder of a run whose measured times calibrate the plan.
        trust: import the code that the recipe names; otherwise only its source is read.
        keywords: values by key with `__` for each dot: `grpo__max_num_steps=20`.

    Raises:
        RecipeError: if no plan can be made. A plan that does not fit is returned, with `problems`.
    """
    calibrated = None if plan_from is None else Path(plan_from).absolute()
    with naming_arguments(keywords), trusting(Trust.EVERYTHING if trust else None):
        examined = examine(os.fspath(recipe), arguments(overrides, keywords), dry=True, plan_from=calibrated, wants_plan=True)
        requested = examined.prepared[-1] if examined.prepared else None
        if requested is None or requested.plan is None:
            raise RecipeError(*dict.fromkeys(examined.problems), *(requested.no_plan if requested else ()))
    shared = {
        "recipe": requested.recipe,
        "problems": tuple(at_argument(problem, keywords) for problem in dict.fromkeys(examined.problems)),
        "site_problems": tuple(at_argument(problem, keywords) for problem in dict.fromkeys(examined.site_problems)),
        "warnings": tuple(requested.plan.warnings()),
        "notes": tuple(requested.notes),
        "gpus": requested.plan.gpus,
    }
    shared["fits"] = not shared["problems"] and not shared["warnings"]
    if isinstance(requested.plan, EvaluationPlan):
        return RunPlan(**shared, **_evaluation_figures(requested.plan))
    return RunPlan(**shared, **_figures(requested, requested.plan))


def _figures(requested: Prepared, plan: Plan) -> dict[str, Any]:
    timed = bool(plan.phases)
    return {
        "backend": "megatron" if uses_megatron(requested.recipe.policy) else "fsdp2",
        "train_bytes": dict(plan.train.parts),
        "generate_bytes": dict(plan.generate.parts) if plan.generate else None,
        "kv_cache_tokens": plan.generate.tokens if plan.generate else None,
        "refit_seconds": plan.seconds.get("refit"),
        "phase_seconds": {phase.name: phase.seconds for phase in plan.phases},
        "step_seconds": plan.step if timed else None,
        "steps": plan.steps,
        "total_seconds": plan.total if timed else None,
        "gpu_hours": plan.gpu_hours if timed else None,
        "submissions": plan.submissions if timed else None,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "text": plan_table.text(plan, variants.compare(plan)),
    }


def _evaluation_figures(plan: EvaluationPlan) -> dict[str, Any]:
    seconds = plan.seconds
    return {
        "backend": None,
        "train_bytes": None,
        "generate_bytes": dict(plan.memory.parts),
        "kv_cache_tokens": plan.memory.tokens,
        "refit_seconds": None,
        "phase_seconds": {task.name: took for task in plan.tasks if (took := plan.task_seconds(task)) is not None},
        "step_seconds": None,
        "steps": None,
        "total_seconds": seconds,
        "gpu_hours": None if seconds is None else plan.gpus * seconds / 3600,
        "submissions": None,
        "checkpoint_bytes": None,
        "text": evaluation.text(plan),
    }
