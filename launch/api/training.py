"""A run that trains, whose checkpoints can be evaluated."""

from __future__ import annotations

from typing import Any

from launch.api.evaluations import EvaluationRun, evaluate
from launch.api.overrides import Overrides
from launch.api.run import BaseRun


class Run(BaseRun):
    """A submitted run, by its folder. Every method reads the folder and the job anew, so a Run never becomes stale.

    `hetstep.submit` and `hetstep.load` make it. All methods raise RecipeError for a folder or a job that cannot be read.
    """

    def evaluate(
        self, suite: str | None = None, overrides: Overrides | None = None, *, step: int | None = None, **keywords: Any
    ) -> EvaluationRun:
        """Submit an evaluation of a checkpoint, as `hetstep.evaluate(suite, run=...)` does."""
        return evaluate(suite, overrides, run=self, step=step, **keywords)
