"""Submit prepared recipes from a terminal, follow a job to its end, and cancel it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.executors import allocation, slurm_client
from launch.executors.executor import ROOT, RunJob
from launch.executors.record import read_record
from launch.plan import evaluation, plan_table
from launch.plan.evaluation import EvaluationPlan
from launch.runs import run_setup
from launch.runs.evaluation_progress import evaluates
from launch.submission import run_control
from launch.submission.prepare import RESTART_S, Prepared, folder_name
from launch.submission.preview import print_notes
from launch.terminal import console
from pipeline import config
from pipeline.config import Problem, RecipeError

if TYPE_CHECKING:
    from launch.runs.follow import MetricsTail

CANCELLED = 130
"""Exit status after a cancellation."""


def submit(prepared: list[Prepared], detach: bool) -> int:
    """Run the recipes one after another, and return the exit status. detach: whether to return once they are submitted."""
    main_recipe = prepared[-1].recipe
    run_dir = Path(main_recipe.run_dir).absolute()
    if complete := run_control.completion_message(main_recipe, run_dir):
        console.print_field("done", complete, complete, "green")
        return 0
    run_setup.refuse_live(run_dir)
    if detach:
        return _submit_detached(prepared)
    for run in prepared:
        recipe, folder = run.recipe, Path(run.recipe.run_dir).absolute()
        metrics = _metrics_so_far(folder)
        job = run_setup.live_job(folder) if recipe is not main_recipe else None  # a needed run may already be active
        if status := follow_to_end(folder, job or start(run), run_control.max_steps(recipe), metrics):
            return status
    return 0


def _submit_detached(prepared: list[Prepared]) -> int:
    if len(prepared) > 1 and (name := prepared[-1].executor.name) != "slurm":
        names = ", ".join(run.recipe.name for run in prepared[:-1])
        why = f"the {name} executor cannot wait for the needed runs ({names}). Try to submit them first, or detach=false"
        raise RecipeError(Problem("detach", "unsupported", why))
    job_ids: dict[str, str] = {}
    for run in prepared:
        recipe, run_dir = run.recipe, Path(run.recipe.run_dir).absolute()
        after = tuple(job_ids[need] for need in map(config.name_of, recipe.needs) if need in job_ids)
        job = run_setup.live_job(run_dir) or start(run, after)
        job_ids[folder_name(recipe)] = job.job_id
        print(f"follow it: python {ROOT / 'launch/submit.py'} follow={run_dir}", flush=True)  # never wrapped, to be copied
    return 0


def start(prepared: Prepared, after: tuple[str, ...] = (), behind: tuple[str, ...] = ()) -> RunJob:
    """Submit one recipe, and return its job.

    after: Slurm jobs that must succeed before it starts. behind: Slurm jobs that must end before it starts. Raises RecipeError
    if the run folder is in use.
    """
    recipe, choice = prepared.recipe, prepared.choice
    run_dir = Path(recipe.run_dir).absolute()
    job = run_control.start(prepared, [sys.executable, *sys.argv], print, after, behind)
    print_notes(prepared)
    if isinstance(prepared.plan, EvaluationPlan):
        print(f"{evaluation.text(prepared.plan)}\n")
    elif prepared.plan:
        print(f"{plan_table.text(prepared.plan)}\n")
    console.print_field(recipe.name, f"{job.name()}, in {run_dir}", f"{recipe.name}: {job.name()}, in {run_dir}")
    if choice:
        console.print_field("backend", str(choice), f"{recipe.name}: {choice}")
    if choice and (line := choice.recomputation):
        console.print_field("recomputation", line, f"{recipe.name}: {line}")
    if choice and choice.warning:
        print(f"warning: {choice.warning}", file=sys.stderr)
    if line := run_control.start_evaluations(recipe):
        console.print_field("evaluation", line, f"{recipe.name}: {line}")
    return job


def attach(run_dir: Path) -> int:
    """Follow a submitted run to its end, and return the exit status. Raises RecipeError."""
    if not run_dir.is_dir():
        raise RecipeError(Problem("follow", "file-not-found", f"{run_dir} is not a run folder: there is no such folder"))
    record = read_record(run_dir)
    if record is None:
        raise RecipeError(Problem("follow", "not-a-run", f"{run_dir} is not a run folder: it has no job.json"))
    if record.executor == "slurm" and (why := slurm_client.unreachable(RESTART_S)):
        status = f"python {ROOT / 'launch/status.py'} {run_dir}"
        message = f"the state of Slurm job {record.job_id} is unknown: {why}. Try `{status}`, which reads the run folder"
        raise RecipeError(Problem("follow", "unreachable", message))
    return follow_to_end(
        run_dir, record.attach(run_dir), run_control.max_steps(config.read(run_dir / "recipe.yaml")), _metrics_so_far(run_dir)
    )


def _follow():
    from launch.runs import follow  # rich takes 50 ms, which `detach=true` need not pay

    return follow


def _metrics_so_far(run_dir: Path) -> MetricsTail:
    metrics = _follow().MetricsTail(run_dir)
    metrics.new_lines()
    return metrics


# ---- follow and cancel --------------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM arrives, which cancels the run without a question."""


def handle_signals() -> None:
    """Let SIGTERM cancel the followed job, as Ctrl-C does, without a question."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    if allocation.batch_job() is None:  # in a batch job, the script of the steps handles it
        raise Terminated


def follow_to_end(run_dir: Path, job: RunJob, steps: int | None, metrics: MetricsTail) -> int:
    """Follow a job to its end, and return the exit status. Ctrl-C cancels it; on a terminal, after a question."""
    follower = _follow().Follower(run_dir, job, steps, metrics)
    while True:
        try:
            return 0 if follower.follow() else 1
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) or not sys.stdin.isatty() or _wants_to_cancel():
                return cancel(run_dir, job, evaluates(run_dir))


def _wants_to_cancel() -> bool:
    try:
        input("\ncancel the run? press Ctrl-C again to cancel it, Enter to go on ")
    except KeyboardInterrupt:
        return True
    except EOFError:
        return False
    return False


def cancel(run_dir: Path, job: RunJob, evaluates: bool = False) -> int:
    """Cancel a job, wait for its end for a while, and return the exit status 130.

    evaluates: whether the job is an evaluation, which has answers instead of checkpoints
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second signal does not interrupt the cancellation
    print(f"\ncancelling {job.name()} ...", flush=True)
    status = run_control.cancel(run_dir, job)
    how = "with the missing answers" if evaluates else "from the last checkpoint"
    print(f"{job.name()}: {status}; the same command continues {how}" if status.ended else f"{job.name()} is still {status}")
    return CANCELLED
