"""A run that trains, whose checkpoints can be evaluated."""

from __future__ import annotations

from typing import Any

from launch.api.errors import NotEnded
from launch.api.evaluating import EvaluationRun, evaluate
from launch.api.overrides import Overrides, arguments, naming_arguments
from launch.api.run import BaseRun
from launch.runs import steer_request


class Run(BaseRun):
    """A submitted run in its folder, as `hetstep.submit` and `hetstep.load` return it.

    Every method reads the folder and the job anew, so a Run never becomes stale. All methods raise RecipeError for a folder or
    a job that cannot be read.
    """

    def steer(
        self,
        overrides: Overrides | None = None,
        *,
        wait: bool = True,
        timeout: float | None = steer_request.TIMEOUT_S,
        **keywords: Any,
    ) -> int | None:
        """Change live keys of the run between two steps: `run.steer(policy__optimizer__kwargs__lr=1e-6)`.

        The change is checked as a recipe is, takes effect at the end of the current step, and is kept when the run resumes.

        Args:
            overrides: keys and values, dotted or nested.
            wait: Wait until the run has applied the change.
            timeout: seconds to wait; None: without a limit.
            **keywords: keys and values, with `__` for each dot.

        Returns:
            The number of steps that were complete when the change took effect; None without `wait`.

        Raises:
            RecipeError: if the run is not live, or a key or a value is refused.
            NotEnded: after `timeout`; the request stays, and takes effect later.
        """
        with naming_arguments(keywords):
            request = steer_request.ask(self.folder, arguments(overrides, keywords))
        if not wait:
            return None
        try:
            return steer_request.wait(self.folder, request, timeout).step
        except steer_request.NotAnswered as late:
            raise NotEnded(self.folder, str(late)) from None

    def evaluate(
        self, suite: str | None = None, overrides: Overrides | None = None, *, step: int | None = None, **keywords: Any
    ) -> EvaluationRun:
        """Submit an evaluation of a checkpoint, as `hetstep.evaluate(suite, run=...)` does."""
        return evaluate(suite, overrides, run=self, step=step, **keywords)
