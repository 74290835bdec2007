"""Find the recipes that a run needs, and all their problems, before anything is created or submitted.

The checks cover the recipe, the files of its models and data, storage and Slurm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.executors import allocation, cuda_variables, local, selection, slurm_client
from launch.executors.components import components
from launch.plan import backend_choice, evaluation, placement
from launch.plan.estimate import Plan, plan
from launch.plan.evaluation import EvaluationPlan
from launch.preflight import (
    agent_commands,
    architecture,
    container_images,
    data_files,
    evaluation_data,
    file_systems,
    input_files,
    installed,
    libraries,
    slurm_cluster,
    slurm_job,
    slurm_request,
    tried_optimizers,
    user_imports,
)
from launch.preflight import current_allocation as allocated
from launch.recipes import reading, trust
from launch.recipes.model_files import ModelNotFound, PendingModel
from launch.runs import evaluation_sources, follower_process, run_setup, suites
from launch.runs.run_events import refusals
from launch.submission import needed_recipe
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Loaded, Problem, Recipe, RecipeError, collected, refuse
from pipeline.models.shape import UnknownShape

RESTART_S = 10.0
"""How long a submission to Slurm waits for a controller that is being restarted."""


@dataclass(frozen=True)
class Prepared:
    """A recipe without problems of its own, with the chosen train backend and executor."""

    recipe: Recipe
    choice: backend_choice.BackendChoice | None  # None in an evaluation; in a dry run, if the model is not here
    executor: selection.ExecutorChoice
    plan: Plan | EvaluationPlan | None  # None if no plan can be made, or none is asked for without GPUs
    notes: list[str]  # what could not be checked; of a NeMo-RL recipe also what was changed or ignored
    inherited: tuple[str, ...] = ()  # overrides that a needed recipe inherits from the requested one
    no_plan: tuple[Problem, ...] = ()  # why no plan can be made, if the run may succeed all the same
    from_environment: dict[str, Any] = field(default_factory=dict)  # as of `Loaded`


@dataclass(frozen=True)
class Examination:
    """The examined runs of a recipe and of the recipes that it needs, with all their problems."""

    prepared: list[Prepared]  # in the order of the runs; [] if the requested recipe has problems of its own
    problems: list[Problem]  # of recipes and plans
    site_problems: list[Problem]  # of files, storage and Slurm, where the recipe would run
    requested: Recipe | None = None  # if its run_dir and its cluster.audit have no problems

    @property
    def all_problems(self) -> list[Problem]:
        """The problems of the recipes, then the problems of this site."""
        return [*self.problems, *self.site_problems]

    def refuse(self) -> None:
        """Raise RecipeError if there are problems. The audit log records permissions that this user was denied."""
        recipe = self.requested
        with refusals(Path(recipe.run_dir).absolute(), recipe.cluster.audit) if recipe else contextlib.nullcontext():
            refuse(self.all_problems)


def prepare(name: str, overrides: list[str], plan_from: Path | None = None) -> list[Prepared]:
    """Return the recipes to run, in order, the requested one last. Needed recipes that are complete are left out.

    plan_from: the folder of a run whose measurements calibrate the plan. Raises RecipeError with all problems.
    """
    examination = examine(name, overrides, dry=False, plan_from=plan_from)
    examination.refuse()
    return examination.prepared


def examine(name: str, overrides: list[str], dry: bool, plan_from: Path | None = None, wants_plan: bool = False) -> Examination:
    """Examine a recipe and the recipes that it needs.

    dry: whether nothing will be submitted, so that no Slurm controller needs to answer. wants_plan: whether to plan recipes
    without GPUs too, whose plan nothing else needs; a plan imports torch and transformers. Raises RecipeError for a recipe that
    cannot be read.
    """
    with trust.trusting(trust.current(dry)):
        return examine_loaded(run_order(name, overrides), dry, plan_from, wants_plan)


def examine_loaded(ordered: list[Loaded], dry: bool, plan_from: Path | None = None, wants_plan: bool = False) -> Examination:
    """Examine recipes, which are in the order of their runs with the requested one last. dry, wants_plan: as in `examine`."""
    pending: list[PendingModel] = []
    prepared: list[Prepared] = []
    problems: list[Problem] = []
    site_problems: list[Problem] = []
    inherited: dict[Problem, Problem] = {}  # a needed recipe's problem in an inherited key -> the requested recipe's problem
    usable = False
    for loaded in ordered:
        calibrated = plan_from if loaded is ordered[-1] else None  # of the requested recipe, not of those that it needs
        with trust.trusting(trust.current(dry)):
            latest, own_problems, site = _examine(loaded, pending, dry, calibrated, wants_plan)
        usable = latest is not None
        prepared += [latest] if latest else []
        recipe = latest.recipe if latest else loaded.recipe
        needed = "" if loaded is ordered[-1] else f"{folder_name(recipe)}, which is needed first"
        keys = {override.partition("=")[0] for override in loaded.inherited}
        of_evaluation = _examine_evaluation(recipe, pending, dry) if not own_problems else []
        known = {(problem.key, problem.code) for problem in site}
        site += [problem for problem in of_evaluation if (problem.key, problem.code) not in known]
        inherited |= {problem.within(needed): problem for problem in (*own_problems, *site) if problem.key in keys}
        problems += [problem.within(needed) for problem in own_problems]
        site_problems += [problem.within(needed) for problem in site]
        head = "logprobs" if "algorithm" in loaded.faulty else build(recipe).needs.head
        pending.append(PendingModel(Path(recipe.run_dir), recipe.policy, head))
    everything = [*problems, *site_problems]
    problems, site_problems = (
        [problem for problem in some if inherited.get(problem) not in everything] for some in (problems, site_problems)
    )
    requested = None if {"run_dir", "cluster.audit"} & set(ordered[-1].faulty) else ordered[-1].recipe
    return Examination(prepared if usable else [], problems, site_problems, requested)


def _examine(
    loaded: Loaded, pending: list[PendingModel], dry: bool, plan_from: Path | None = None, wants_plan: bool = False
) -> tuple[Prepared | None, list[Problem], list[Problem]]:
    """Return (prepared recipe, problems of the recipe, problems of this site).

    The prepared recipe is None if there are problems before its layout is checked.
    """
    prepared, problems, notes = None, list(loaded.problems), list(loaded.notes)
    recipe, executor = loaded.recipe, selection.choose(loaded.recipe)
    try:
        recipe, choice = backend_choice.choose(recipe, pending, run_setup.earlier(recipe))
        unread, unread_notes = loaded.unread(recipe)
        problems += unread
        notes += [*unread_notes, *selection.notes(executor, loaded.origins)]
        if not problems:
            layout = list(architecture.against_layout(recipe, pending))
            plans = not layout and (wants_plan or plan_from or config.has_gpus(recipe))
            layout += tried_optimizers.problems(recipe, notes) if plans else ()
            planned, no_plan = _plan(recipe, choice, plan_from, pending, notes, dry) if plans and not layout else (None, ())
            problems += [*layout, *(planned.problems() if planned else ())]
            prepared = Prepared(recipe, choice, executor, planned, notes, loaded.inherited, no_plan, loaded.from_environment)
    except ModelNotFound as error:
        if not problems:
            prepared = Prepared(recipe, None, executor, None, notes, loaded.inherited, (), loaded.from_environment)
        problems += config.independent(error.problems, loaded.faulty)
    except RecipeError as error:
        problems += config.independent(error.problems, loaded.faulty)
    site_problems: list[Problem] = []
    if "algorithm" not in loaded.faulty:  # without it the run's needs are unknown
        site_problems += config.independent(site_problems_of(recipe, executor, pending, dry, notes), loaded.faulty)
        site_problems += folder_problems(recipe) if not problems and not site_problems else []
    return prepared, problems, site_problems


def _examine_evaluation(recipe: Recipe, pending: list[PendingModel], dry: bool) -> list[Problem]:
    """Return the problems of the jobs that will evaluate the run's checkpoints, which the section `evaluation` describes."""
    suite = recipe.evaluation.suite
    if suite is None or not config.trains(recipe):
        return []
    problems: list[Problem] = []
    with collected(problems):
        source = evaluation_sources.of_future(recipe, suites.find(suite)[0])
        loaded = suites.inspect(suite, source, (), follower_process.keys_of(recipe.evaluation))
        _, recipe_problems, site_problems = _examine(placement.place_on_gpus(loaded), pending, dry)
        problems += [*recipe_problems, *site_problems]
    in_section = []
    for problem in problems:
        problem = replace(problem, key="evaluation.suite") if problem.key == "suite" else problem
        has_section = problem.key.startswith("evaluation.") or problem.origin == "evaluation"
        in_section.append(problem if has_section else problem.within("evaluation"))
    return in_section


def _plan(
    recipe: Recipe,
    choice: backend_choice.BackendChoice | None,
    plan_from: Path | None,
    pending: list[PendingModel],
    notes: list[str],
    dry: bool,
) -> tuple[Plan | EvaluationPlan | None, tuple[Problem, ...]]:
    """Return (plan, ()), or (None, the problems that prevent a plan).

    FSDP2 can train models that cannot be planned, and a machine without torch submits without a plan. A note then says why.
    """
    try:
        return plan(recipe, choice, plan_from, pending) if choice else evaluation.plan(recipe, pending, reads=dry), ()
    except UnknownShape as error:
        notes.append(f"no plan: {error}")
        return None, error.problems


def folder_name(recipe: Recipe) -> str:
    """Return the name by which `needs` lists a recipe: its run folder's, which may differ from the recipe's `name`."""
    return Path(recipe.run_dir).name


def run_order(name: str, overrides: list[str]) -> list[Loaded]:
    """Return the recipes to run in order: needed recipes without a complete run, then the requested one.

    Raises RecipeError for a cycle of needs.
    """
    requested = reading.inspect(name, overrides)
    ordered: list[Loaded] = []

    def add(loaded: Loaded, path: list[str]) -> None:
        for need in loaded.recipe.needs:
            named = config.name_of(need)
            if named in path:
                cycle = " -> ".join([*path, named])
                raise RecipeError(Problem("needs", "circular", f"the recipes need each other: {cycle}"))
            if named not in map(folder_name, [other.recipe for other in ordered]):
                needed = needed_recipe.inspect(need, [f"run_dir=runs/{named}"], requested, overrides)
                if run_setup.done_step(Path(needed.recipe.run_dir)) is None:
                    add(needed, [*path, named])
        ordered.append(placement.place_on_gpus(loaded))

    add(requested, [config.name_of(name)])
    return ordered


def site_problems_of(
    recipe: Recipe, chosen: selection.ExecutorChoice, pending: list[PendingModel], dry: bool, notes: list[str]
) -> Iterator[Problem]:
    """Yield the problems of files, storage and Slurm where the recipe would run.

    pending: models that needed runs are still to write. notes: receives checks that were not possible, and problems that only
    delay the start.
    """
    yield from placement.problems(recipe)
    trusted = trust.current(dry)
    code = user_imports.probe(recipe, trusted)
    yield from input_files.problems(recipe, pending, notes, user_imports.fields(recipe, code), trusted)
    yield from data_files.step_problems(recipe, notes)
    unreachable = slurm_client.unreachable(0 if dry else RESTART_S) if chosen.name == "slurm" else None
    yield from evaluation_data.problems(recipe)
    yield from file_systems.problems(recipe, pending, notes, on_nodes=chosen.name != "local" and not unreachable)
    if unreachable:
        yield from container_images.problems_anywhere(recipe, pending)
    notes += [*architecture.notes(recipe, pending), *libraries.notes(recipe)]
    notes += placement.notes(recipe)
    notes += cuda_variables.notes(recipe) if config.trains(recipe) else ()
    if unreachable:
        why = f"got slurm; {unreachable}. Try a machine where Slurm's controller answers, or cluster.executor=local"
        problem = Problem("cluster.executor", "unreachable", why)
        notes += [str(problem), *slurm_request.notes(recipe)] if dry else []
        yield from [] if dry else [problem]
        yield from slurm_cluster.option_problems(slurm_request.requests(recipe))
    else:
        yield from _executor_problems(recipe, chosen, notes)
    yield from installed.sandbox_problems(recipe, chosen.name, notes)
    yield from installed.index_problems(recipe)
    yield from agent_commands.problems(recipe, chosen.name, notes)
    yield from user_imports.problems(recipe, chosen.name, notes, code)


def folder_problems(recipe: Recipe) -> list[Problem]:
    """Return the problems of a recipe's run folder. Only for a recipe without other problems."""
    problems: list[Problem] = []
    with collected(problems):
        run_setup.check(recipe)
    return problems


def _executor_problems(recipe: Recipe, chosen: selection.ExecutorChoice, notes: list[str]) -> Iterator[Problem]:
    notes += [str(chosen)] if chosen.reason else []
    if chosen.name == "local":
        problems: list[Problem] = []
        with collected(problems):
            local.rank_environments(components(recipe))
        why = f" ({chosen})" if chosen.reason else ""
        yield from (replace(problem, message=f"{problem.message}{why}") for problem in problems)
        yield from installed.compiler_problems(recipe)
    elif chosen.name == "slurm":
        yield from slurm_job.problems(recipe, notes)
    elif job_id := allocation.current():
        yield from allocated.problems(recipe, job_id, notes)
        yield from slurm_job.container_problems(recipe, notes)
    else:
        why = "got allocation, but this shell is outside an allocation (salloc), or inside a step (srun). Try slurm"
        yield Problem("cluster.executor", "unreachable", why)
