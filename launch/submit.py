"""Run a recipe: python launch/submit.py recipe=NAME [key=value ...]

    recipe=NAME        a file in recipes/, without .yaml, or a path to one
    key=value          any key of the recipe, e.g. grpo.max_num_steps=20 cluster.executor=local
    detach=true        submit and return; the run goes on
    dry_run=true       print what would be submitted, and write nothing
    follow=RUN_DIR     show the progress of a run that was submitted before

Ends with status 0 if the run succeeded, 1 if it failed, 2 if the recipe is wrong (nothing is submitted then), 130 if cancelled.
Given again, the same command continues the run where it stopped.

Imports neither torch nor transformers: a login node answers at once.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from submitit.core.utils import FailedJobError, FailedSubmissionError

from launch import backend, command_line, local, preflight, run_folder, slurm, task
from launch.follow import Follower, Metrics
from launch.job import JobRecord, RunJob, components, read_record, write_record
from pipeline import config
from pipeline.config import Recipe, RecipeError

FLAGS = ("detach", "dry_run")
CANCEL_WAIT_S = 60


@dataclass(frozen=True)
class Request:
    """The command line."""

    recipe: str | None
    overrides: list[str]
    detach: bool = False
    dry_run: bool = False
    follow: str | None = None


def parse(arguments: list[str]) -> Request:
    """Raises RecipeError for what is not key=value and for a command line that asks for nothing or for two things."""
    special, overrides = command_line.split(arguments, ("recipe", "follow", *FLAGS))
    for flag in FLAGS:
        if special.get(flag, "true").lower() not in ("true", "false"):
            raise RecipeError(f"{flag}: '{special[flag]}' is not true or false")
    if ("recipe" in special) == ("follow" in special):
        raise RecipeError("the command line needs recipe=NAME, or follow=RUN_DIR")
    if "follow" in special and (overrides or len(special) > 1):
        raise RecipeError("follow=RUN_DIR stands alone: the run is what it was submitted as")
    flags = {flag: special.get(flag, "false").lower() == "true" for flag in FLAGS}
    return Request(special.get("recipe"), overrides, follow=special.get("follow"), **flags)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        request = parse(arguments)
        if request.follow:
            return attach(Path(request.follow).absolute())
        planned = plan(request.recipe, request.overrides, request.dry_run)
        if request.dry_run:
            return dry_run(planned)
        return submit(planned, request.detach)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except (FailedJobError, FailedSubmissionError) as error:
        print(f"error: sbatch refused the job: {error}", file=sys.stderr)
        return 2


# ---- what is to run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A recipe that has passed every check, for the train backend that was chosen."""

    recipe: Recipe
    choice: backend.Choice


def plan(name: str, overrides: list[str], dry: bool) -> list[Planned]:
    """What has to run, in order, the asked-for recipe last: needed recipes that are complete are left out. All are checked."""
    executor = [override for override in overrides if override.startswith("cluster.executor=")]
    ordered: list[Recipe] = []

    def add(recipe: Recipe, path: list[str]) -> None:
        for need in recipe.needs:
            if need in path:
                raise RecipeError(f"needs: goes in a circle: {' -> '.join([*path, need])}")
            if need not in [other.name for other in ordered]:
                needed = config.load(need, [f"run_dir=runs/{need}", *executor])
                if run_folder.done_step(Path(needed.run_dir)) is None:
                    add(needed, [*path, need])
        ordered.append(recipe)

    add(config.load(name, overrides), [name])
    pending: list[Path] = []
    planned: list[Planned] = []
    for recipe in ordered:
        _check_executor(recipe, dry)
        recipe, choice = backend.choose(recipe, pending, run_folder.earlier(recipe))
        preflight.check(recipe, pending)
        run_folder.check(recipe)
        pending.append(Path(recipe.run_dir))
        planned.append(Planned(recipe, choice))
    return planned


def choose_executor(recipe: Recipe) -> str:
    """slurm or local."""
    executor = recipe.cluster.executor
    return ("slurm" if shutil.which("sbatch") else "local") if executor == "auto" else executor


def _check_executor(recipe: Recipe, dry: bool) -> None:
    if choose_executor(recipe) == "local":
        local.rank_environments(components(recipe))
    elif not dry and shutil.which("sbatch") is None:
        raise RecipeError("cluster.executor: slurm, but there is no sbatch here; submit from a Slurm login node, or =local")


def dry_run(planned: list[Planned]) -> int:
    for needed in planned[:-1]:
        print(f"# first, because it is needed: {needed.recipe.name}, in {needed.recipe.run_dir}")
    recipe, choice = planned[-1].recipe, planned[-1].choice
    run_dir = Path(recipe.run_dir).absolute()
    if choose_executor(recipe) == "slurm":
        print(slurm.batch_script(run_dir, recipe.name, recipe.cluster, components(recipe)))
    else:
        print(local.commands(run_dir, components(recipe)))
    print(f"# {choice}")
    if choice.warning:
        print(f"# warning: {choice.warning}")
    print(f"# the recipe\n{config.to_yaml(recipe)}", end="")
    return 0


# ---- running it ---------------------------------------------------------------------------------------------------------


def submit(planned: list[Planned], detach: bool) -> int:
    main_recipe = planned[-1].recipe
    run_dir = Path(main_recipe.run_dir).absolute()
    if (step := run_folder.done_step(run_dir)) is not None and step >= max_steps(main_recipe):
        print(f"{run_dir} is complete at step {step}; raise {main_recipe.algorithm}.max_num_steps to go on")
        return 0
    run_folder.refuse_live(run_dir)
    if detach:
        return _submit_detached(planned)
    for each in planned:
        recipe, folder = each.recipe, Path(each.recipe.run_dir).absolute()
        metrics = _metrics_so_far(folder)
        job = run_folder.live_job(folder) if recipe is not main_recipe else None  # a needed run may be under way already
        if status := attend(folder, job or start(each), max_steps(recipe), metrics):
            return status
    return 0


def _submit_detached(planned: list[Planned]) -> int:
    if len(planned) > 1 and choose_executor(planned[-1].recipe) == "local":
        names = ", ".join(each.recipe.name for each in planned[:-1])
        raise RecipeError(
            f"detach: the local executor cannot wait for what is needed first ({names}); run that, or do not detach"
        )
    job_ids: dict[str, str] = {}
    for each in planned:
        recipe, run_dir = each.recipe, Path(each.recipe.run_dir).absolute()
        after = tuple(job_ids[need] for need in recipe.needs if need in job_ids)
        job = run_folder.live_job(run_dir) or start(each, after)
        job_ids[recipe.name] = job.job_id
        print(f"follow it: python {Path(__file__).resolve()} follow={run_dir}")
    return 0


def start(planned: Planned, after: tuple[str, ...] = ()) -> RunJob:
    """Submit one recipe, once the Slurm jobs `after` have succeeded. Raises RecipeError if its folder is in use."""
    recipe, choice = planned.recipe, planned.choice
    run_dir = Path(recipe.run_dir).absolute()
    name = choose_executor(recipe)
    with run_folder.locked(run_dir):
        if name == "slurm":
            executor = slurm.HetSlurmExecutor(run_dir, recipe.name, recipe.cluster, components(recipe), after)
        else:
            executor = local.HetLocalExecutor(run_dir, recipe.cluster.time_min, components(recipe))
        run_folder.prepare(recipe, run_dir, executor.script)
        job = executor.submit(task.rank_main, str(run_dir))
        try:
            write_record(run_dir, JobRecord.of(name, job))
            run_folder.append_manifest(run_dir, name, job.job_id, [sys.executable, *sys.argv])
        except BaseException:
            job.cancel(check=False)  # a job that the folder does not know of must not write into it
            raise
    print(f"{recipe.name}: {job.name()}, in {run_dir}\n{recipe.name}: {choice}", flush=True)
    if choice.warning:
        print(f"warning: {choice.warning}", file=sys.stderr)
    return job


def attach(run_dir: Path) -> int:
    record = read_record(run_dir)
    if record is None:
        raise RecipeError(f"follow: {run_dir} is not a run folder: it has no job.json")
    return attend(run_dir, record.attach(run_dir), max_steps(config.read(run_dir / "recipe.yaml")), _metrics_so_far(run_dir))


def _metrics_so_far(run_dir: Path) -> Metrics:
    metrics = Metrics(run_dir)
    metrics.new_lines()
    return metrics


def max_steps(recipe: Recipe) -> int:
    return getattr(recipe, recipe.algorithm).max_num_steps


# ---- watching it --------------------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, but nobody is there to be asked."""


def _interrupt(_number: int, _frame: object) -> None:
    raise Terminated


def attend(run_dir: Path, job: RunJob, steps: int, metrics: Metrics) -> int:
    """Follow a job to its end. Ctrl-C asks, then cancels; without a terminal it cancels at once. The status to exit with."""
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
