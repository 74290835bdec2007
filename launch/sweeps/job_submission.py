"""Submit a sweep's jobs: as many at once as the suite allows, and each job once, even if the submitter was killed.

Under Slurm no process has to stay. Dependencies (`--dependency=afterany`) make each run wait for the run `max_concurrent`
places before it, and make the check wait for all runs. On this machine the process stays, and starts a run when another has
ended.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path

from launch.executors import slurm, slurm_client, slurm_environment
from launch.executors.executor import ROOT, JobStatus
from launch.runs.attempts import latest
from launch.runs.follow import failure
from launch.submission import foreground
from launch.submission.prepare import prepare
from launch.sweeps.queue import Queue
from launch.sweeps.sweep_folder import JobState, SweepFolder
from launch.terminal import console
from launch.terminal.safe_text import on_one_line
from pipeline import config
from pipeline.config import Problem, RecipeError

POLL_S = 0.5


def due(job_states: list[JobState], retries: int) -> list[JobState]:
    """Return the jobs to submit: missing jobs, and failed jobs with retries left.

    A job is left out if a job that it needs has failed and has no retries left.
    """
    jobs: dict[str, JobState] = {}
    usable = {state.job.name for state in job_states if state.state in ("done", "live")}
    for state in job_states:
        is_due = state.state == "missing" or (state.state == "failed" and state.tries <= retries)
        if is_due and all(need in usable or need in jobs for need in state.job.needs):
            jobs[state.job.name] = state
    return [*jobs.values()]


def start(folder: SweepFolder, job_state: JobState, after: tuple[str, ...] = (), behind: tuple[str, ...] = ()) -> str:
    """Submit one job, and return its id. The submission's output goes into submit.log. Raises RecipeError."""
    folder.refuse_cancelled()
    job = job_state.job
    lines = why_failed(job_state) if job_state.state == "failed" else []
    prepared = prepare(job.recipe, job.overrides)[-1]
    with open(folder.path / "submit.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        handle = foreground.start(prepared, after, behind)
    folder.record(job.name, handle.job_id, lines)
    again = f", again: {lines[0]}" if lines else ""
    print(on_one_line(f"{job.name}: {handle.name()}{again}"), flush=True)
    return handle.job_id


def why_failed(job_state: JobState) -> list[str]:
    """Return the lines of text that say why a job did not complete."""
    job, run_dir = job_state.job, Path(job_state.job.run_dir)
    if job_state.record is None:
        return [f"was not submitted, because {', '.join(job.needs)} failed"] if job.needs else ["was not submitted"]
    if job.needs and latest(run_dir) is None:
        return [f"did not start, because it needs {', '.join(job.needs)} to succeed ({job_state.status})"]
    return failure(run_dir, job_state.record.attach(run_dir), job_state.status or JobStatus("UNKNOWN"))


# ---- under Slurm --------------------------------------------------------------------------------------------------------


def submit_all(folder: SweepFolder, todo: list[JobState], live: list[JobState]) -> None:
    """Submit the jobs in `todo` so that at most `max_concurrent` jobs run at once, those in `live` included.

    Raises RecipeError if a submission fails. The jobs submitted before go on, and the same command submits the rest.
    """
    limit = folder.suite.max_concurrent
    ids = {state.job.name: state.record.job_id for state in live if state.record}
    queue = sorted(ids.values(), key=int)
    for state in todo:
        after = tuple(ids[need] for need in state.job.needs if need in ids)
        behind = (queue[-limit],) if len(queue) >= limit else ()
        ids[state.job.name] = start(folder, state, after, behind)
        queue.append(ids[state.job.name])


def submit_check(folder: SweepFolder, waits_for: list[str]) -> str:
    """Submit the Slurm job that checks the gates, and return its id. Raises RecipeError.

    waits_for: ids of the jobs that must have ended before it starts.
    """
    suite, plan = folder.suite, folder.plan
    recipes = (Path(job.run_dir) / "recipe.yaml" for job in plan.jobs if job.run is not None)
    submitted = next(path for path in recipes if path.exists())  # not all are, if a needed run has failed for good
    first = next(iter(config.components(config.read(submitted)).values()))
    options = {
        "job-name": f"{suite.name}-check",
        "output": folder.path / "check.log",
        "open-mode": "append",
        "chdir": plan.cwd,
        "ntasks": 1,
        "time": suite.check.time_min,
        "partition": suite.check.partition or first.partition,
        "account": suite.check.account or first.account,
        "qos": suite.check.qos or first.qos,
        "mem": suite.check.mem,
        "dependency": slurm.dependency(afterany=tuple(waits_for)),
    }
    command = [sys.executable, "-u", str(ROOT / "launch/sweep.py"), f"check={folder.path}"]
    script = folder.path / "check.sh"
    head = "#!/bin/bash\n# Checks the gates after all runs have ended, and retries failed runs.\n"
    script.write_text(f"{head}{slurm_environment.export_wishes()}exec {shlex.join(command)}\n")
    options |= {key: value for key, value in slurm_environment.wishes().items() if options.get(key) is None}
    flags = [f"--{key}={value}" for key, value in options.items() if value is not None]
    try:
        return slurm_client.submit(script.read_text(), *flags)
    except slurm_client.SlurmError as error:
        if error.kind == "failed":
            message = f"sbatch refused the job that checks the gates: {error.output}"
            raise RecipeError(Problem("check", "refused-by-slurm", message)) from None
        message = f"{error}. Try the same command again; it finds the job if Slurm has accepted it"
        raise RecipeError(Problem("check", "unreachable", message)) from None


# ---- on this machine ----------------------------------------------------------------------------------------------------


def run_here(folder: SweepFolder) -> None:
    """Run all jobs on this machine, with retries, and return when none is left. Raises RecipeError."""
    suite = folder.suite
    printed: dict[str, str] = {}
    while True:
        folder.refuse_cancelled()
        job_states = folder.job_states(Queue("local"))
        print_changes(job_states, printed)
        live = [state for state in job_states if state.state == "live"]
        todo = due(job_states, suite.retries)
        if not live and not todo:
            return
        complete = {state.job.name for state in job_states if state.state == "done"}
        ready = [state for state in todo if complete.issuperset(state.job.needs)]
        for state in ready[: max(0, suite.max_concurrent - len(live))]:
            start(folder, state)
        time.sleep(POLL_S)


def print_changes(job_states: list[JobState], printed: dict[str, str]) -> None:
    """Print a line for each job whose state differs from its state in `printed`, and update `printed`."""
    for state in job_states:
        now = state.state if state.status is None else f"{state.state}, {state.status}"
        if state.state != "missing" and printed.get(state.job.name) != now:
            printed[state.job.name] = now
            console.print_field(state.job.name, on_one_line(now), on_one_line(f"{state.job.name}: {now}"))
