"""Run a recipe: python launch/submit.py recipe=NAME [key=value ...]

RECIPE may be one of NeMo-RL's: its keys are translated, and what was changed or means nothing here is said.

Ends with status 0 if the run succeeded, 1 if it failed, 2 if the recipe is wrong (nothing is submitted then), 130 if cancelled.
Given again, the same command continues the run where it stopped.

Imports neither torch nor transformers: a login node answers at once.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch import backend, command_line, recipes, run_setup, slurm_client, task, troubleshooting
from launch.command_line import Key
from launch.components import components
from launch.executors import allocation, local, selection, slurm
from launch.executors.base import RunJob
from launch.executors.record import JobRecord, read_record, write_record
from launch.model_files import PendingModel
from launch.plan import modes, report
from launch.plan.estimate import plan
from launch.preflight import architecture
from launch.prepare import RESTART_S, Prepared, examine, file_problems, folder_name, folder_problems, prepare, run_order
from launch.units import plural
from pipeline import config, secrets
from pipeline.algorithms import build
from pipeline.config import Problem, Recipe, RecipeError, bound, collected, only_evaluates, reference, refuse, section
from pipeline.problem_codes import CODES

if TYPE_CHECKING:
    from launch.follow import MetricsTail

FLAGS = ("show", "plan", "dry_run", "detach")
CANCEL_WAIT_S = 60


@dataclass(frozen=True)
class SubmitRequest:
    """The command line."""

    recipe: Annotated[str | None, Key("NAME", "a file in recipes/, without .yaml, or a path to one")] = None
    overrides: Annotated[
        list[str], Key("key=value", "any key of the recipe, e.g. grpo.max_num_steps=20 cluster.executor=local", others=True)
    ] = field(default_factory=list)
    show: Annotated[bool, Key("true", "print the resolved recipe, each value with the file and line that set it")] = False
    plan: Annotated[
        bool, Key("true", "print the plan: memory, bytes, seconds, GPU-hours; needs the model's config.json alone")
    ] = False
    plan_from: Annotated[
        Path | None, Key("RUN_DIR", "calibrate the plan by this run's phases; default: the run folder itself")
    ] = None
    dry_run: Annotated[
        bool, Key("true", "print what would be submitted, whatever keeps it from running here; write nothing")
    ] = False
    detach: Annotated[bool, Key("true", "submit and return; the run goes on")] = False
    follow: Annotated[Path | None, Key("RUN_DIR", "show the progress of a run that was submitted before")] = None
    help: Annotated[
        str | None,
        Key(
            "[KEY]",
            "print type, range, default and meaning of a recipe's key or section, or cause and cure of an error's code",
            read=str,
        ),
    ] = None

    def problems(self) -> Iterator[Problem]:
        asked = [flag for flag in FLAGS if getattr(self, flag)]
        if len(asked) > 1:
            yield Problem(asked[1], "contradiction", f"got {' and '.join(asked)}; expected one of them")
        if self.recipe is None and self.follow is None and self.help is None:
            yield Problem("recipe", "missing-value", "the command line needs recipe=NAME, or follow=RUN_DIR")
        if self.follow and (self.recipe or self.overrides or self.plan_from or asked):
            yield Problem(
                "follow",
                "contradiction",
                "got other keys too; expected follow=RUN_DIR alone: the run is what it was submitted as",
            )


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, SubmitRequest, execute, arguments)


def execute(request: SubmitRequest) -> int:
    """Raises RecipeError."""
    if request.help is not None:
        print(troubleshooting.explained(request.help) if request.help in CODES else reference.explained(request.help))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    if request.follow:
        return attach(request.follow)
    if request.show:
        return show(request.recipe, request.overrides)
    if request.plan:
        return show_plan(request.recipe, request.overrides, request.plan_from)
    if request.dry_run:
        prepared, problems = examine(request.recipe, request.overrides, dry=True, plan_from=request.plan_from)
        if prepared:
            dry_run(prepared, problems)
        refuse(problems)
        return 0
    return submit(prepare(request.recipe, request.overrides, request.plan_from), request.detach)


# ---- looking at it ------------------------------------------------------------------------------------------------------


def show(name: str, overrides: list[str]) -> int:
    loaded = recipes.inspect(name, overrides)
    print(secrets.redacted(config.format_with_origins(loaded)), end="")
    refuse(loaded.problems)
    return 0


def show_plan(name: str, overrides: list[str], before: Path | None) -> int:
    """Print the plan, for which the models' config.json is enough, and below it what else a submission needs."""
    *needed, loaded = run_order(name, overrides)
    refuse(loaded.problems)
    pending = [PendingModel(Path(each.recipe.run_dir), each.recipe.policy, build(each.recipe).needs.head) for each in needed]
    recipe, choice = backend.choose(loaded.recipe, pending, run_setup.earlier(loaded.recipe))
    unread, notes = loaded.unread(recipe)
    refuse([*unread, *architecture.against_layout(recipe, pending)])
    planned = plan(recipe, choice, before, pending)
    notes = [*loaded.notes, *notes]
    missing = list(file_problems(recipe, selection.choose(recipe), pending, True, notes)) or folder_problems(recipe)
    for note in notes:
        print(f"# {note}")
    print(report.text(planned, modes.compare(planned)))
    if missing:
        print("\nbefore it can run here:\n  - " + "\n  - ".join(map(str, missing)))
    refuse(planned.problems())
    return 0


def dry_run(prepared: list[Prepared], problems: list[str]) -> None:
    """Print what would be submitted, also where problems keep it from running here."""
    for needed in prepared[:-1]:
        print(f"# first, because it is needed: {needed.recipe.name}, in {needed.recipe.run_dir}")
    main_one = prepared[-1]
    recipe, choice = main_one.recipe, main_one.choice
    run_dir = Path(recipe.run_dir).absolute()
    name = main_one.executor.name
    if name == "allocation":
        print(allocation.script(run_dir, recipe.cluster, components(recipe)))
    elif name == "slurm":
        print(slurm.batch_script(run_dir, recipe.name, recipe.cluster, components(recipe)))
    else:
        with collected([]):  # too few GPUs, which is among the problems
            print(local.commands(run_dir, components(recipe)))
    if problems:
        print("# not to be submitted as it is: the problems are told below")
    print(f"# {choice or 'which backend trains depends on the size of the model, which is not here'}")
    if choice and choice.warning:
        print(f"# warning: {choice.warning}")
    for note in main_one.notes:
        print(f"# {note}")
    print(f"# the recipe\n{config.to_yaml(recipe)}", end="", flush=True)


# ---- running it ---------------------------------------------------------------------------------------------------------


def submit(prepared: list[Prepared], detach: bool) -> int:
    main_recipe = prepared[-1].recipe
    run_dir = Path(main_recipe.run_dir).absolute()
    if complete := nothing_left(main_recipe, run_dir):
        print(complete)
        return 0
    run_setup.refuse_live(run_dir)
    if detach:
        return _submit_detached(prepared)
    for each in prepared:
        recipe, folder = each.recipe, Path(each.recipe.run_dir).absolute()
        metrics = _metrics_so_far(folder)
        job = run_setup.live_job(folder) if recipe is not main_recipe else None  # a needed run may be under way already
        if status := attend(folder, job or start(each), max_steps(recipe), metrics):
            return status
    return 0


def nothing_left(recipe: Recipe, run_dir: Path) -> str | None:
    """Return the message that the run is complete, if this recipe, which may have other bounds, asks for no more of it."""
    step, own, key = run_setup.done_step(run_dir), section(recipe), recipe.algorithm
    if step is None or only_evaluates(recipe):
        return None
    if step >= own.max_num_steps:
        return f"{run_dir} is complete at step {step}; raise {key}.max_num_steps to go on"
    before = run_setup.earlier(recipe)
    if before is None or step >= section(before).max_num_steps or own.max_num_epochs > section(before).max_num_epochs:
        return None
    return (
        f"{run_dir} is complete at step {step}: its data ended after {plural(section(before).max_num_epochs, 'epoch')}; raise"
        f" {key}.max_num_epochs or take another run_dir to go on"
    )


def _submit_detached(prepared: list[Prepared]) -> int:
    if len(prepared) > 1 and (name := prepared[-1].executor.name) != "slurm":
        names = ", ".join(each.recipe.name for each in prepared[:-1])
        why = f"the {name} executor cannot wait for what is needed first ({names}); run that, or do not detach"
        raise RecipeError(Problem("detach", "unsupported", why))
    job_ids: dict[str, str] = {}
    for each in prepared:
        recipe, run_dir = each.recipe, Path(each.recipe.run_dir).absolute()
        after = tuple(job_ids[need] for need in map(config.name_of, recipe.needs) if need in job_ids)
        job = run_setup.live_job(run_dir) or start(each, after)
        job_ids[folder_name(recipe)] = job.job_id
        print(f"follow it: python {Path(__file__).resolve()} follow={run_dir}")
    return 0


def start(prepared: Prepared, after: tuple[str, ...] = (), behind: tuple[str, ...] = ()) -> RunJob:
    """Submit one recipe, once the Slurm jobs `after` have succeeded and those `behind` which it waits have ended.

    Raises RecipeError if its folder is in use.
    """
    recipe, choice = prepared.recipe, prepared.choice
    run_dir = Path(recipe.run_dir).absolute()
    name = prepared.executor.name
    with run_setup.locked(run_dir):
        if name == "allocation":
            runner = allocation.AllocationExecutor(run_dir, recipe.cluster, components(recipe))
            name = runner.kind
        elif name == "slurm":
            runner = slurm.HetSlurmExecutor(run_dir, recipe.name, recipe.cluster, components(recipe), after, behind)
        else:
            runner = local.HetLocalExecutor(run_dir, recipe.cluster, components(recipe))
        run_setup.prepare(recipe, run_dir, runner.script)
        try:
            job = runner.submit(task.rank_main, str(run_dir))
        except slurm_client.SlurmError as error:
            raise RecipeError(_not_submitted(error)) from error
        try:
            write_record(run_dir, JobRecord.of(name, job))
            run_setup.append_manifest(run_dir, name, job.job_id, [sys.executable, *sys.argv])
        except BaseException:
            job.cancel(check=False)  # a job that the folder does not know of must not write into it
            raise
    for note in prepared.notes:
        print(f"# {note}")
    if prepared.plan:
        print(f"{report.text(prepared.plan)}\n")
    print(f"{recipe.name}: {job.name()}, in {run_dir}\n{recipe.name}: {choice}", flush=True)
    if choice.warning:
        print(f"warning: {choice.warning}", file=sys.stderr)
    return job


def _not_submitted(error: slurm_client.SlurmError) -> Problem:
    if error.kind == "late":
        why = f"{error}. If `squeue --me` shows a job of this recipe's name, cancel it: it cannot run. Then try again"
        return Problem("", "unreachable", why)
    return Problem("", "refused-by-slurm", f"sbatch refused the job: {error.output or error}")


def attach(run_dir: Path) -> int:
    if not run_dir.is_dir():
        raise RecipeError(Problem("follow", "file-not-found", f"{run_dir} is not a run folder: there is no such folder"))
    record = read_record(run_dir)
    if record is None:
        raise RecipeError(Problem("follow", "not-a-run", f"{run_dir} is not a run folder: it has no job.json"))
    if record.executor == "slurm" and (why := slurm_client.unreachable(RESTART_S)):
        told = f"python {Path(__file__).with_name('status.py')} {run_dir}"
        message = f"Slurm job {record.job_id} cannot be asked: {why}. `{told}` tells what the folder holds"
        raise RecipeError(Problem("follow", "unreachable", message))
    return attend(run_dir, record.attach(run_dir), max_steps(config.read(run_dir / "recipe.yaml")), _metrics_so_far(run_dir))


def _metrics_so_far(run_dir: Path) -> MetricsTail:
    from launch.follow import MetricsTail  # and rich, which only a command that follows a run waits for

    metrics = MetricsTail(run_dir)
    metrics.new_lines()
    return metrics


def max_steps(recipe: Recipe) -> int | None:
    """Return the number of steps; None: as many as its epochs of data have, or none at all."""
    return bound(section(recipe).max_num_steps) or None


# ---- watching it --------------------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, but nobody is there to be asked."""


def _interrupt(_number: int, _frame: object) -> None:
    if allocation.batch_job() is None:  # there the steps' script gets it, once there is one
        raise Terminated


def attend(run_dir: Path, job: RunJob, steps: int | None, metrics: MetricsTail) -> int:
    """Follow a job to its end, and return the exit status. Ctrl-C asks, then cancels; without a terminal it cancels at once."""
    from launch.follow import Follower

    follower = Follower(run_dir, job, steps, metrics)
    while True:
        try:
            return 0 if follower.follow() else 1
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) or not sys.stdin.isatty() or _wants_to_cancel():
                return cancel(job)


def _wants_to_cancel() -> bool:
    try:
        input("\ncancel the run? press Ctrl-C again to cancel it, Enter to go on ")
    except KeyboardInterrupt:
        return True
    except EOFError:
        return False
    return False


def cancel(job: RunJob) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # what has begun is brought to its end, within CANCEL_WAIT_S
    print(f"\ncancelling {job.name()} ...", flush=True)
    job.cancel(check=False)
    deadline = time.monotonic() + CANCEL_WAIT_S
    while not (status := job.status(now=True)).ended and time.monotonic() < deadline:
        time.sleep(0.2)
    print(
        f"{job.name()}: {status}; the same command goes on from the last checkpoint"
        if status.ended
        else f"{job.name()} is still {status}"
    )
    return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
