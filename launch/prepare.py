"""Find what has to run for a recipe, and all its problems, before anything is created or submitted.

The problems are those of the recipe itself, of its models' and data's files, of storage, and of Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launch import backend, cuda_variables, needed_recipe, placement, recipes, run_setup, slurm_client
from launch.components import components
from launch.executors import allocation, local, selection
from launch.model_files import ModelNotFound, PendingModel
from launch.model_shape import UnknownShape
from launch.plan.estimate import Plan, plan
from launch.preflight import current_allocation as allocated
from launch.preflight import (
    custom_code,
    input_files,
    libraries,
    sandbox_support,
    slurm_job,
    slurm_request,
    slurm_sbatch,
    storage,
)
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Loaded, Problem, Recipe, RecipeError, collected, refuse

RESTART_S = 10.0
"""How long a recipe that names Slurm waits for a controller that is being restarted."""


@dataclass(frozen=True)
class Prepared:
    """A recipe that can be used, for the train backend that was chosen."""

    recipe: Recipe
    choice: backend.BackendChoice | None  # None: for want of the model, in a dry run
    executor: selection.ExecutorChoice
    plan: Plan | None  # None: of a family of models of which no plan can be made
    notes: list[str]  # what could not be checked; of a NeMo-RL recipe also what was changed, and what is ignored
    inherited: tuple[str, ...] = ()  # of a needed recipe: the overrides that it takes from the one that needs it


def prepare(name: str, overrides: list[str], plan_from: Path | None = None) -> list[Prepared]:
    """Return what has to run, in order, the asked-for recipe last: needed recipes that are complete are left out.

    plan_from: a run folder by which the plan is calibrated. Raises RecipeError with all problems.
    """
    prepared, problems = examine(name, overrides, dry=False, plan_from=plan_from)
    refuse(problems)
    return prepared


def examine(name: str, overrides: list[str], dry: bool, plan_from: Path | None = None) -> tuple[list[Prepared], list[Problem]]:
    """Return what has to run, as `prepare` does, and all problems; nothing has to run if the asked-for recipe cannot be used.

    dry: the batch script is only wanted to be seen, so that there need be no Slurm. Raises RecipeError for what cannot be read.
    """
    pending: list[PendingModel] = []
    prepared: list[Prepared] = []
    problems: list[Problem] = []
    handed: dict[Problem, Problem] = {}  # a needed recipe's, in a key that was handed on to it -> the asked-for recipe's
    ordered = run_order(name, overrides)
    for loaded in ordered:
        recipe, choice, own, notes = loaded.recipe, None, list(loaded.problems), list(loaded.notes)
        chosen = selection.choose(recipe)
        try:
            recipe, choice = backend.choose(recipe, pending, run_setup.earlier(recipe))
            unread, noted = loaded.unread(recipe)
            own += unread
            notes += noted
            if not own:
                planned = _planned(recipe, choice, plan_from, pending, notes)
                own += planned.problems() if planned else ()
                prepared.append(Prepared(recipe, choice, chosen, planned, notes, loaded.inherited))
        except ModelNotFound as error:
            if not own:
                prepared.append(Prepared(recipe, choice, chosen, None, notes, loaded.inherited))
            own += config.independent(error.problems, loaded.faulty)
        except RecipeError as error:
            own += config.independent(error.problems, loaded.faulty)
        if "algorithm" not in loaded.faulty:  # without one nothing is known of what the run does
            own += config.independent(file_problems(recipe, chosen, pending, dry, notes), loaded.faulty)
            own += folder_problems(recipe) if not own else []
        needed = "" if loaded is ordered[-1] else f"{folder_name(recipe)}, which is needed first"
        keys = {override.partition("=")[0] for override in loaded.inherited}
        handed |= {problem.within(needed): problem for problem in own if problem.key in keys}
        problems += [problem.within(needed) for problem in own]
        head = "logprobs" if "algorithm" in loaded.faulty else build(recipe).needs.head
        pending.append(PendingModel(Path(recipe.run_dir), recipe.policy, head))
    problems = [problem for problem in problems if handed.get(problem) not in problems]
    usable = prepared and prepared[-1].recipe.run_dir == ordered[-1].recipe.run_dir
    return prepared if usable else [], problems


def _planned(
    recipe: Recipe, choice: backend.BackendChoice, plan_from: Path | None, pending: list[Path], notes: list[str]
) -> Plan | None:
    """Return the plan; None, with a note, for a family that cannot be planned: FSDP2 may train it all the same."""
    try:
        return plan(recipe, choice, plan_from, pending)
    except UnknownShape as error:
        notes.append(f"no plan: {error}")
        return None


def folder_name(recipe: Recipe) -> str:
    """Return the name by which `needs` asks for a recipe: that of its run folder, whatever the recipe's own `name` is."""
    return Path(recipe.run_dir).name


def run_order(name: str, overrides: list[str]) -> list[Loaded]:
    """Return the recipe, preceded by those that it needs and that have not run. Raises RecipeError if they need each other."""
    asked_for = recipes.inspect(name, overrides)
    ordered: list[Loaded] = []

    def add(loaded: Loaded, path: list[str]) -> None:
        for need in loaded.recipe.needs:
            named = config.name_of(need)
            if named in path:
                circle = " -> ".join([*path, named])
                raise RecipeError(Problem("needs", "circular", f"the recipes need each other: {circle}"))
            if named not in map(folder_name, [other.recipe for other in ordered]):
                needed = needed_recipe.inspect(need, [f"run_dir=runs/{named}"], asked_for, overrides)
                if run_setup.done_step(Path(needed.recipe.run_dir)) is None:
                    add(needed, [*path, named])
        ordered.append(placement.placed(loaded))

    add(asked_for, [config.name_of(name)])
    return ordered


def file_problems(
    recipe: Recipe, chosen: selection.ExecutorChoice, pending: list[Path], dry: bool, notes: list[str]
) -> Iterator[Problem]:
    """Yield the problems of files, folders and Slurm.

    pending: run folders of needed recipes that have not run yet. notes: takes in what could not be checked, and what only
    delays the start.
    """
    yield from placement.problems(recipe)
    yield from input_files.problems(recipe, pending, notes)
    unreachable = slurm_client.unreachable(0 if dry else RESTART_S) if chosen.name == "slurm" else None
    yield from storage.problems(recipe, pending, notes, on_nodes=chosen.name != "local" and not unreachable)
    notes += libraries.unchecked(recipe)
    notes += placement.notes(recipe)
    notes += cuda_variables.notes(recipe)
    if unreachable:
        why = f"got slurm; {unreachable}. Try it where a controller answers, or cluster.executor=local"
        told = Problem("cluster.executor", "unreachable", why)
        notes += [str(told)] if dry else []
        yield from [] if dry else [told]
        yield from slurm_sbatch.option_problems(slurm_request.requests(recipe))
    else:
        yield from _executor_problems(recipe, chosen, notes)
    yield from sandbox_support.problems(recipe, chosen.name, notes)
    yield from custom_code.problems(recipe, chosen.name, notes)


def folder_problems(recipe: Recipe) -> list[Problem]:
    """Return the problems of a recipe's run folder. Call it only for a recipe that has no other problem."""
    with collected(found := []):
        run_setup.check(recipe)
    return found


def _executor_problems(recipe: Recipe, chosen: selection.ExecutorChoice, notes: list[str]) -> Iterator[Problem]:
    notes += [str(chosen)] if chosen.reason else []
    if chosen.name == "local":
        with collected(found := []):
            local.rank_environments(components(recipe))
        why = f" ({chosen})" if chosen.reason else ""
        yield from (replace(problem, message=f"{problem.message}{why}") for problem in found)
    elif chosen.name == "slurm":
        yield from slurm_job.problems(recipe, notes)
    elif job_id := allocation.current():
        yield from allocated.problems(recipe, job_id, notes)
        yield from slurm_job.container_problems(recipe, notes)
    else:
        why = "got allocation, but this is in none (salloc), or in a step of one (srun). Try slurm, which submits a job"
        yield Problem("cluster.executor", "unreachable", why)
