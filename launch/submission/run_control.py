"""Start the job of a prepared recipe, cancel it, or ask it to save and stop. Nothing here prints."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from launch.executors import allocation, local, rank_task, slurm, slurm_client
from launch.executors.components import components
from launch.executors.executor import JobStatus, RunJob
from launch.executors.record import JobRecord, write_record
from launch.runs import follower_process, run_events, run_setup, suites
from launch.runs.attempts import STOP, AttemptFolder, of_job
from launch.runs.run_events import DENIED, refusals
from launch.runs.run_folder import RunFolder
from launch.submission import origin
from launch.submission.prepare import Prepared
from launch.terminal.units import plural
from pipeline import config
from pipeline.algorithms.early_stop import EarlyStopConfig
from pipeline.config import Problem, Recipe, RecipeError, bound, only_evaluates, section
from pipeline.files.storage import write_durably

CANCEL_WAIT_S = 60
SIGNALS = "signals"
"""Name of the file of an attempt from which rank 0 reads signals; see pipeline/job/signals.py."""
ASKED = "SIGUSR2\n"
"""Line of the file `signals` that asks the ranks to save at the end of the step and exit."""
POLL_S = 0.2
STOP_POLL_S = 0.5


# ---- start --------------------------------------------------------------------------------------------------------------


def completion_message(recipe: Recipe, run_dir: Path) -> str | None:
    """Return a message if the run is complete within the bounds of this recipe; None if steps are left."""
    record, bounds, key = run_setup.completion(run_dir), section(recipe), recipe.algorithm
    if record is None or only_evaluates(recipe):
        return None
    complete = f"{run_dir} is complete at step {record['step']}"
    if record["step"] >= bounds.max_num_steps:
        return f"{complete}; raise {key}.max_num_steps to continue"
    run = RunFolder.at(run_dir)
    steered = run.changed_values.get(f"{key}.max_num_steps")
    if steered is not None and record["step"] >= steered and bounds.max_num_steps == run.value(f"{key}.max_num_steps"):
        return (
            f"{complete}: launch/steer.py set {key}.max_num_steps to {steered}. To continue, try a value"
            f" other than {bounds.max_num_steps}, the submitted value"
        )
    recipe_before = run_setup.earlier(recipe)
    if recipe_before is None:
        return None
    before = section(recipe_before)
    if why := record.get("early_stop"):
        rules = [rule.name for rule in fields(EarlyStopConfig)]
        changed = any(getattr(bounds, name) != getattr(before, name) for name in rules)
        return None if changed else f"{complete}: {why}; change {key}.stop_... to continue, or take another run_dir"
    if record["step"] >= before.max_num_steps or bounds.max_num_epochs > before.max_num_epochs:
        return None
    return (
        f"{complete}: its data ended after {plural(before.max_num_epochs, 'epoch')}; raise {key}.max_num_epochs to continue, or"
        " take another run_dir"
    )


def max_steps(recipe: Recipe) -> int | None:
    """Return the maximum number of steps; None if only the epochs of data bound it, or the recipe only evaluates."""
    return bound(section(recipe).max_num_steps) or None


def start(
    prepared: Prepared,
    command: list[str],
    tell: Callable[[str], None],
    after: tuple[str, ...] = (),
    behind: tuple[str, ...] = (),
) -> RunJob:
    """Submit one recipe, and return its job.

    command: the command line, for the manifest. tell: a function that gets a line about each folder whose mode is changed.
    after: Slurm jobs that must succeed before it starts. behind: Slurm jobs that must end before it starts. Raises RecipeError
    if the run folder is in use, or if the submission cannot be recorded in the audit log.
    """
    recipe = prepared.recipe
    assert prepared.choice is not None or not config.trains(recipe), "only a dry run has no backend"
    run_dir = Path(recipe.run_dir).absolute()
    name = prepared.executor.name
    with refusals(run_dir, recipe.cluster.audit), run_setup.lock_run(run_dir, tell):
        if name == "allocation":
            runner = allocation.AllocationExecutor(run_dir, recipe.cluster, components(recipe))
            name = runner.kind
        elif name == "slurm":
            runner = slurm.HetSlurmExecutor(run_dir, recipe.name, recipe.cluster, components(recipe), after, behind)
        else:
            runner = local.HetLocalExecutor(run_dir, recipe.cluster, components(recipe))
        found = origin.of_submission(recipe)
        for values in _emit_submission(recipe, run_dir, name, found):
            found |= values
        run_setup.prepare(recipe, run_dir, runner.script, prepared.from_environment)
        for warning in itertools.chain(*run_events.emit(lambda observer: observer.prepared(recipe, run_dir))):
            tell(f"# warning: {warning}")
        try:
            job = runner.submit(rank_task.rank_main, str(run_dir))
            assert isinstance(job, RunJob), "each executor names its class of jobs"
        except slurm_client.SlurmError as error:
            raise RecipeError(_not_submitted(error)) from error
        try:
            write_record(run_dir, JobRecord.of(name, job))
            run_setup.append_manifest(run_dir, name, job.job_id, command, found)
            run_events.emit(lambda observer: observer.submitted(recipe, run_dir, job.name(), job.job_id))
        except BaseException:
            job.cancel(check=False)  # a job without a record must not write into the folder
            raise
    return job


def _emit_submission(recipe: Recipe, run_dir: Path, executor: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return run_events.emit(lambda observer: observer.submitting(recipe, run_dir, executor, found))


def start_evaluations(recipe: Recipe) -> str | None:
    """Start the process that evaluates the run's checkpoints, and return a line about it; None if the recipe has no suite."""
    if recipe.evaluation.suite is None:
        return None
    request = follower_process.FollowRequest(Path(recipe.run_dir).absolute(), None)
    return follower_process.start(request, suites.find(recipe.evaluation.suite)[0])


def _not_submitted(error: slurm_client.SlurmError) -> Problem:
    if error.kind == "late":
        why = f"{error}. If `squeue --me` shows a job with this recipe's name, cancel it, because it cannot run. Then try again"
        return Problem("", "unreachable", why)
    return Problem("", "refused-by-slurm", f"sbatch refused the job: {error.output or error}")


# ---- end ----------------------------------------------------------------------------------------------------------------


def cancel(run_dir: Path, job: RunJob) -> JobStatus:
    """Cancel a job, wait for its end at most CANCEL_WAIT_S, and return its status. Does nothing to a job that has ended.

    Raises RecipeError if this user may not cancel the job. Also raises RecipeError, after the cancellation, if the audit log
    cannot record it.
    """
    if (status := job.status(now=True)).ended:
        return status
    try:
        _emit_end("cancel", run_dir, job, status)
    finally:
        with refusals(run_dir):
            _cancel(job)
        deadline = time.monotonic() + CANCEL_WAIT_S
        while not (status := job.status(now=True)).ended and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return status


def _emit_end(action: Literal["cancel", "stop_and_save"], run_dir: Path, job: RunJob, status: JobStatus) -> None:
    run_events.emit(lambda observer: observer.ending(action, run_dir, job.name(), job.job_id, status.state))


def _cancel(job: RunJob) -> None:
    """Cancel a job, unless it has ended meanwhile. Raises RecipeError if this user may not."""
    try:
        job.cancel()
    except ProcessLookupError:
        pass
    except (PermissionError, slurm_client.SlurmError) as error:
        if isinstance(error, PermissionError) or "permission denied" in error.output.lower():
            why = f"got {job.name()}, which this user may not cancel: {error}; expected a job of this user. Try as its owner"
            raise RecipeError(Problem("run", DENIED, why)) from error


def stop_and_save(run_dir: Path, job: RunJob, timeout_s: float | None = None) -> JobStatus:
    """Ask a job to save and stop, wait for its end, and return its status. A job that has not started is cancelled.

    The ranks save at the end of their step, as before a time limit; the job is not requeued. If the job starts again meanwhile,
    its new attempt is asked too. Raises TimeoutError after `timeout_s`, with the request still in place. Raises RecipeError
    without asking the job if the audit log cannot record the request, or if this user may not write into the run's folder.
    """
    if not (status := job.status(now=True)).ended:
        _emit_end("stop_and_save", run_dir, job, status)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not (status := job.status(now=True)).ended:
        attempts = of_job(run_dir, job.job_id)
        with refusals(run_dir):
            if attempts and attempts[-1].verdict is None:
                _ask(attempts[-1])
            elif status.state == "PENDING":
                _cancel(job)
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{job.name()} has not saved and stopped within {timeout_s:g} s; the request to stop remains")
        time.sleep(STOP_POLL_S)
    return status


def _ask(attempt: AttemptFolder) -> None:
    """Ask the ranks of an attempt to save and exit, if they have not been asked yet.

    The file `stop` is written first, so that the verdict about the attempt finds it.
    """
    signals = attempt.folder / SIGNALS
    if not attempt.asked_to_stop:
        write_durably(attempt.folder / STOP, "asked to stop\n")
    if not signals.exists() or ASKED not in signals.read_text():  # an earlier request may have been interrupted
        with open(signals, "a") as file:
            file.write(ASKED)
