"""Submit a recipe, open the folder of a run, and resolve a recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from launch.api.evaluating import EvaluationRun
from launch.api.overrides import Overrides, arguments, naming_arguments
from launch.api.training import Run
from launch.executors import allocation
from launch.executors.executor import ROOT
from launch.recipes import reading
from launch.runs import run_setup
from launch.runs.run_folder import RunFolder
from launch.submission import run_control
from launch.submission.prepare import Prepared, folder_name, prepare
from pipeline import config
from pipeline.config import Problem, Recipe, RecipeError


def submit(
    recipe: str | os.PathLike[str],
    overrides: Overrides | None = None,
    /,
    *,
    plan_from: str | os.PathLike[str] | None = None,
    progress: bool = False,
    **keywords: Any,
) -> Run:
    """Submit a recipe, or continue its run, and return the run while it goes on.

    The recipes under `needs` run first, unless they are complete: on Slurm as jobs that this one waits for; elsewhere this call
    waits for their end. A run that is complete is returned as it is.

    Args:
        recipe: a name in recipes/, or a path to a YAML file of ours or of NeMo-RL.
        overrides: values by key, dotted or nested: `{"grpo.max_num_steps": 20}` or `{"grpo": {"max_num_steps": 20}}`.
        plan_from: the folder of a run whose measured times calibrate the plan, by which memory is judged.
        progress: Print what is submitted, and the progress of the runs that are waited for.
        keywords: values by key with `__` for each dot: `grpo__max_num_steps=20`. They win over `overrides`.

    Raises:
        RecipeError: for problems of the recipe, its files or the cluster, all at once in `problems`. Nothing is submitted.
        RunFailed: if a run that is needed first failed.
    """
    name = os.fspath(recipe)
    with naming_arguments(keywords):
        values = arguments(overrides, keywords)
        recipes = prepare_submission(name, values, None if plan_from is None else Path(plan_from).absolute())
    return start(recipes, name, values, progress)


def prepare_submission(recipe: str, values: list[str], plan_from: Path | None = None) -> list[Prepared]:
    """Return the recipes that a submission would run, the requested one last.

    values: overrides as `key=value`. Raises RecipeError.
    """
    _refuse_batch_job()
    return prepare(recipe, values, plan_from)


def start(prepared: list[Prepared], recipe: str, values: list[str], progress: bool = False) -> Run:
    """Submit prepared recipes, as `submit` does.

    recipe, values: the name and the overrides of the requested recipe, for the manifest.
    """
    requested = prepared[-1].recipe
    run_dir = Path(requested.run_dir).absolute()
    if message := run_control.completion_message(requested, run_dir):
        return Run(run_dir, [message])
    run_setup.refuse_live(run_dir)
    command = [sys.executable, str(ROOT / "launch/submit.py"), f"recipe={recipe}", *values]
    job_ids: dict[str, str] = {}
    for item in prepared[:-1]:
        folder = Path(item.recipe.run_dir).absolute()
        job = run_setup.live_job(folder)
        needed = Run(folder, job=job) if job else _start(item, command, _after(item, job_ids), progress)
        if item.executor.name == "slurm":
            job_ids[folder_name(item.recipe)] = needed.job_id
        else:
            needed.wait(progress=progress)
    return _start(prepared[-1], command, _after(prepared[-1], job_ids), progress)


def _after(prepared: Prepared, job_ids: dict[str, str]) -> tuple[str, ...]:
    return tuple(job_ids[need] for need in map(config.name_of, prepared.recipe.needs) if need in job_ids)


def _start(prepared: Prepared, command: list[str], after: tuple[str, ...], progress: bool) -> Run:
    """Submit one prepared recipe, and return its run, which holds the notes of the submission."""
    recipe, choice = prepared.recipe, prepared.choice
    notes = list(prepared.notes)
    job = run_control.start(prepared, command, lambda line: notes.append(line.removeprefix("# ")), after)
    notes += [f"warning: {choice.warning}"] if choice and choice.warning else []
    notes += [f"recomputation: {choice.recomputation}"] if choice and choice.recomputation else []
    if line := run_control.start_evaluations(recipe):
        notes.append(line)
    run = Run(Path(recipe.run_dir), notes, job)
    if progress:
        print("\n".join([*(f"# {note}" for note in notes), f"{recipe.name}: {job.name()}, in {run.folder}"]), flush=True)
    return run


def _refuse_batch_job() -> None:
    """Raise RecipeError inside launch/hetstep.sbatch, where a submission handles the signals of its process."""
    if job_id := allocation.batch_job():
        message = (
            f"got a call inside job {job_id} of launch/hetstep.sbatch, where only launch/submit.py may start ranks. Try a shell"
            " outside the job"
        )
        raise RecipeError(Problem("cluster.executor", "unsupported", message))


def load(run_dir: str | os.PathLike[str]) -> Run | EvaluationRun:
    """Return the run in a folder; an EvaluationRun if it is an evaluation.

    Any command or program may have submitted the run. Raises RecipeError if the folder is not a run's.
    """
    run = RunFolder.at(Path(run_dir).absolute())
    return Run(run.folder) if run.trains else EvaluationRun(run.folder)


def recipe(name: str | os.PathLike[str], overrides: Overrides | None = None, /, **keywords: Any) -> Recipe:
    """Return a recipe, resolved and checked. Its fields are the keys: `recipe("tiny_grpo").grpo.max_num_steps`.

    Args:
        name: a name in recipes/, or a path to a YAML file of ours or of NeMo-RL.
        overrides: values by key, dotted or nested.
        keywords: values by key with `__` for each dot.

    Raises:
        RecipeError: for problems of the recipe, all at once in `problems`. Files and the cluster are not looked at.
    """
    with naming_arguments(keywords):
        return reading.load(os.fspath(name), arguments(overrides, keywords))
