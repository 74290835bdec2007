"""Submit an evaluation, read its scores, and compare them with those of another evaluation."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from launch.api.overrides import Overrides, arguments, naming_arguments
from launch.api.run import BaseRun, RunStatus
from launch.evaluate import EvaluateRequest, evaluations
from launch.evaluations import evaluation_job
from launch.executors.executor import ROOT
from launch.runs import run_setup, score_tables, waiting_checkpoints
from launch.runs.evaluation_comparison import compare
from launch.terminal.safe_text import plain
from pipeline.config import Problem, RecipeError, refuse

if TYPE_CHECKING:
    from launch.runs.evaluation_comparison import TaskComparison


@dataclass(frozen=True)
class TaskScore:
    """The score of a task in its own metric, with its 95% interval over the questions."""

    metric: str
    value: float | None  # None: no answer could be judged
    low: float | None
    high: float | None
    questions: int
    samples: int  # answers


class EvaluationRun(BaseRun):
    """An evaluation. It has the methods of a `Run`, with answers and scores in place of steps."""

    @override
    def wait(self, timeout: float | None = None, *, progress: bool = False) -> RunStatus:
        """Wait as `Run.wait` does, and release the checkpoint if it was kept for the evaluation."""
        status = super().wait(timeout, progress=progress)
        if evaluation_job.is_complete(self.folder):
            waiting_checkpoints.release(self.folder)
        return status

    def scores(self) -> dict[str, TaskScore]:
        """Return task -> its score. Raises RecipeError before the evaluation is complete."""
        return {name: _score(task) for name, task in self._read()["tasks"].items()}

    def all_scores(self) -> dict[str, Any]:
        """Return scores.json: every metric of every task, and the warnings. Raises RecipeError as `scores` does."""
        return self._read()

    def table(self) -> str:
        """Return the scores as `python launch/evaluate.py` prints them. Raises RecipeError as `scores` does."""
        return "\n".join(map(plain, score_tables.lines(self._read())))

    def compare(self, before: BaseRun | str | os.PathLike[str]) -> list[TaskComparison]:
        """Return for each task whether this evaluation is better than another complete evaluation, worse, or neither.

        The answers are compared question by question. `summary` of each comparison is one line of text.
        """
        folder = before.folder if isinstance(before, BaseRun) else Path(before).absolute()
        return compare(evaluation_job.read_complete(folder), evaluation_job.read_complete(self.folder))

    def _read(self) -> dict[str, Any]:
        scores = score_tables.read(self.folder)
        if scores is None:
            message = f"{self.folder} has no {score_tables.SCORES} yet: the evaluation is not complete. Try wait()"
            raise RecipeError(Problem("run", "file-not-found", message))
        return scores


def _score(task: dict[str, Any]) -> TaskScore:
    metric = task["metrics"][task["metric"]]
    return TaskScore(task["metric"], metric["value"], metric.get("low"), metric.get("high"), task["questions"], task["samples"])


def evaluate(
    suite: str | None = None,
    overrides: Overrides | None = None,
    /,
    *,
    run: BaseRun | str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    step: int | None = None,
    **keywords: Any,
) -> EvaluationRun:
    """Submit the evaluation of a run's checkpoint, or of a model, and return it while it goes on.

    A complete or running evaluation is returned as it is; an interrupted evaluation goes on.

    Args:
        suite: a name in recipes/suites/, a path, or `lm_eval:TASK,...`; None: the suite of the run's section `evaluation`.
        overrides: values by key of the recipe, dotted or nested.
        run: a run, or its folder. Give either `run` or `model`.
        model: a folder, or a name of the Hugging Face Hub.
        step: the step of the run's checkpoint; None: the latest.
        keywords: values by key with `__` for each dot.

    Raises:
        RecipeError: for problems of the recipe, its files or the cluster, all at once in `problems`. Nothing is submitted.
    """
    with naming_arguments(keywords):
        request = EvaluateRequest(
            suite=suite,
            run=None if run is None else run.folder if isinstance(run, BaseRun) else Path(run).absolute(),
            step=None if step is None else str(step),
            model=None if model is None else os.fspath(model),
            overrides=arguments(overrides, keywords),
        )
        refuse(request.problems())
        (evaluation,) = evaluations(request)
        refuse(evaluation.loaded.problems)
        run_dir = evaluation.run_dir
        if evaluation_job.is_complete(run_dir):
            run_setup.check(evaluation.recipe)  # refuses the folder if it is another evaluation's
            evaluation_job.finish(evaluation)
            return EvaluationRun(run_dir)
        job = run_setup.live_job(run_dir) or evaluation_job.start(evaluation, _command(request))
    return EvaluationRun(run_dir, job=job)


def _command(request: EvaluateRequest) -> list[str]:
    """Return the command line that submits the same evaluation."""
    values = {"suite": request.suite, "run": request.run, "model": request.model, "step": request.step}
    keys = [f"{key}={value}" for key, value in values.items() if value is not None]
    return [sys.executable, str(ROOT / "launch/evaluate.py"), *keys, *request.overrides]
