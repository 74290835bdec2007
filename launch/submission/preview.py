"""Print a recipe's plan, or the batch script and recipe that a submission would use, without a submission."""

from __future__ import annotations

from pathlib import Path

from launch.executors import allocation, local, slurm
from launch.executors.components import components
from launch.plan import evaluation, plan_table, variants
from launch.plan.evaluation import EvaluationPlan
from launch.submission import first_prompt
from launch.submission.prepare import Examination, Prepared
from launch.terminal import console
from pipeline import config
from pipeline.config import Problem, RecipeError, collected, refuse


def show_plan(examination: Examination) -> int:
    """Print the plan, the first prompt, and the files, folders and services that are missing here for a run.

    Raises RecipeError for the recipe's own problems, and for a chat template that cannot be used.
    """
    requested = examination.prepared[-1] if examination.prepared else None
    if requested is None or requested.plan is None:
        raise RecipeError(*dict.fromkeys(examination.problems), *(requested.no_plan if requested else ()))
    print_notes(requested)
    if isinstance(requested.plan, EvaluationPlan):
        print(evaluation.text(requested.plan))
    else:
        print(plan_table.text(requested.plan, variants.compare(requested.plan)))
    if prompt := first_prompt.text(requested.recipe):
        print(f"\n{prompt}")
    unusable = [problem for problem in examination.site_problems if problem.key.endswith(".tokenizer.chat_template")]
    if unmet := [problem for problem in dict.fromkeys(examination.site_problems) if problem not in unusable]:
        console.print_unmet("before it can run here", unmet)
    refuse([*examination.problems, *unusable])
    return 0


def dry_run(examination: Examination) -> int:
    """Print the script or commands and the recipe that would be submitted, even if problems prevent it.

    Then raises RecipeError with the problems, if there are any.
    """
    if examination.prepared:
        _print_submission(examination.prepared, examination.all_problems)
    refuse(examination.all_problems)
    return 0


def print_notes(prepared: Prepared) -> None:
    """Print the notes of the checks about a recipe."""
    for note in prepared.notes:
        console.print_field("note", note, f"# {note}")


def _print_submission(prepared: list[Prepared], problems: list[Problem]) -> None:
    for needed in prepared[:-1]:
        print(f"# first, because it is needed: {needed.recipe.name}, in {needed.recipe.run_dir}")
    requested = prepared[-1]
    recipe, choice = requested.recipe, requested.choice
    run_dir = Path(recipe.run_dir).absolute()
    name = requested.executor.name
    if name == "allocation":
        print(allocation.script(run_dir, recipe.cluster, components(recipe)))
    elif name == "slurm":
        print(slurm.batch_script(run_dir, recipe.name, recipe.cluster, components(recipe)))
    else:
        with collected([]):  # too few GPUs, which `problems` reports
            print(local.commands(run_dir, components(recipe)))
    if problems:
        print("# cannot be submitted yet: the problems are below")
    if config.trains(recipe):
        print(f"# {choice or 'the train backend depends on the size of the model, which is unknown here'}")
    if choice and choice.recomputation:
        print(f"# recomputation: {choice.recomputation}")
    if choice and choice.warning:
        print(f"# warning: {choice.warning}")
    for note in requested.notes:
        print(f"# {note}")
    print(f"# the recipe\n{config.to_yaml(recipe)}", end="", flush=True)
