"""Run one evaluation, from its recipe to its scores, by the same means as launch/submit.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.executors.executor import RunJob
from launch.plan import placement
from launch.runs import run_setup, score_tables, suites, waiting_checkpoints
from launch.runs.evaluation_comparison import compare
from launch.runs.evaluation_folder import read as read_folder
from launch.runs.evaluation_sources import Source
from launch.submission import foreground, prepare, run_control
from launch.submission.prepare import Examination
from launch.terminal.safe_text import plain
from pipeline.config import Loaded, Problem, Recipe, RecipeError, refuse

if TYPE_CHECKING:
    from launch.runs.evaluation_folder import EvaluationFolder


@dataclass(frozen=True)
class Evaluation:
    """Holds the evaluation of one source (a checkpoint or a model) by one suite."""

    loaded: Loaded
    source: Source

    @property
    def recipe(self) -> Recipe:
        """The recipe of the job."""
        return self.loaded.recipe

    @property
    def run_dir(self) -> Path:
        """The run folder of the evaluation."""
        return Path(self.recipe.run_dir).absolute()


def read(suite: str, source: Source, overrides: Iterable[str], more: Mapping[str, Any] = {}) -> Evaluation:
    """Return an evaluation. more: as in `suites.inspect`. Raises RecipeError for files that cannot be read."""
    return Evaluation(placement.place_on_gpus(suites.inspect(suite, source, overrides, more)), source)


def is_complete(run_dir: Path) -> bool:
    """Return whether an evaluation has ended with all its answers judged."""
    if not run_setup.ended_well(run_dir):
        return False
    scores = score_tables.read(run_dir)
    return scores is not None and not any(task.get("unjudged") for task in scores["tasks"].values())


def examine(evaluation: Evaluation, dry: bool, wants_plan: bool = False) -> Examination:
    """Return the evaluation's job with all its problems. dry, wants_plan: as in `prepare.examine`."""
    return prepare.examine_loaded([evaluation.loaded], dry, wants_plan=wants_plan)


def run(evaluation: Evaluation, detach: bool) -> int:
    """Submit an evaluation, follow it, print its scores, and return the exit status.

    An interrupted evaluation is continued. detach: return once it is submitted. Raises RecipeError.
    """
    refuse(evaluation.loaded.problems)
    run_dir = evaluation.run_dir
    if is_complete(run_dir):
        run_setup.check(evaluation.recipe)  # refuses the folder if it is another evaluation's
        finish(evaluation)  # after detach=true nobody else does
        print(f"{run_dir} is complete")
        print_scores(run_dir)
        return 0
    prepared = [] if run_setup.live_job(run_dir) else _prepared(evaluation)
    if job := run_setup.live_job(run_dir):  # also one that another process, such as a follower, has submitted meanwhile
        if detach:
            print(f"{job.name()} evaluates already, in {run_dir}")
            return 0
        status = foreground.attach(run_dir)
    else:
        status = foreground.submit(prepared, detach)
    if not detach:
        finish(evaluation)
        print_scores(run_dir)
    return status


def start(evaluation: Evaluation, command: Sequence[str] | None = None) -> RunJob:
    """Submit an evaluation without printing anything, and return its job.

    command: the command line for the manifest; None: that of this process. Raises RecipeError.
    """
    return run_control.start(_prepared(evaluation)[-1], list(command or [sys.executable, *sys.argv]), lambda line: None)


def _prepared(evaluation: Evaluation) -> list[prepare.Prepared]:
    found = examine(evaluation, dry=False)
    found.refuse()
    if evaluation.source.checkpoint:
        waiting_checkpoints.keep(evaluation.source.checkpoint, evaluation.source.run_dir)
    return found.prepared


def finish(evaluation: Evaluation) -> None:
    """If an evaluation is complete, release the checkpoint that was kept for it."""
    if evaluation.source.checkpoint and is_complete(evaluation.run_dir):
        waiting_checkpoints.release(evaluation.source.run_dir)


def print_scores(run_dir: Path) -> None:
    """Print the scores of an evaluation, if it has any."""
    if scores := score_tables.read(run_dir):
        print("\n".join(map(plain, score_tables.lines(scores))), flush=True)


def read_complete(folder: Path) -> EvaluationFolder:
    """Return the complete evaluation in a folder. Raises RecipeError if there is none."""
    found = read_folder(folder)
    if found is None:
        message = f"got {folder}; expected the folder of a complete evaluation, which has a {score_tables.SCORES}"
        raise RecipeError(Problem("compare", "file-not-found", message))
    return found


def print_comparison(other: EvaluationFolder, run_dir: Path) -> None:
    """Print for each task whether the evaluation in `run_dir` is better than `other`, worse, or neither."""
    print(f"compared with {other.label}, in {other.folder}")
    for each in compare(other, read_complete(run_dir)):
        print(plain(f"{each.task}, {each.metric}: {each.summary}"), flush=True)
        for warning in each.warnings:
            print(plain(f"warning: {each.task}: {warning}"), flush=True)
