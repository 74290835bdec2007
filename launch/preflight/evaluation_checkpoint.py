"""Check that the checkpoint of an evaluation is complete and is one of the recipe's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline import config
from pipeline.checkpoints import checkpoint
from pipeline.config import Problem, Recipe, RecipeError


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of `evaluate.checkpoint`; none if the recipe evaluates a model without a checkpoint."""
    settings = recipe.evaluate
    if config.trains(recipe) or settings.checkpoint is None:
        return
    folder = Path(settings.checkpoint)
    folders = [folder]
    if settings.run and settings.step:
        folders.append(Path(settings.run) / f"checkpoints/step_{settings.step:06d}")
    if not any(map(checkpoint.read, folders)):
        message = f"got {folders[-1]}; expected a complete checkpoint of a run, RUN_DIR/checkpoints/step_N"
        yield Problem("evaluate.checkpoint", "no-checkpoint", message)
    run_dir = Path(settings.run) if settings.run else folder.parent.parent
    if not (run_dir / "recipe.yaml").exists():
        return
    try:
        trained = config.read(run_dir / "recipe.yaml").policy
    except RecipeError:  # of another version
        return
    for key in ("model_name", "hf_config_overrides"):
        configured, trained_value = getattr(recipe.policy, key), getattr(trained, key)
        if configured != trained_value:
            message = f"got {configured}; expected {trained_value}, the value in the recipe of {run_dir}. Try without the key"
            yield Problem(f"policy.{key}", "contradiction", message)
