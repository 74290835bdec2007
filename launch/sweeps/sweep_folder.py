"""Read and write a sweep's folder: its suite, its jobs, their submissions and states.

    runs/sweeps/<name>/<id>/
      suite.yaml     the resolved suite             check.sh, check.log   the job that checks the gates at the end
      sweep.json     jobs, executor, folders        verdict.json          the outcome of every gate
      jobs.jsonl     a line per submission          junit.xml, report.md, report.html
      runs/<run>-<seed>/                            the run folders
      cancelled      present after `SweepRun.cancel`, until the sweep is continued
A job's state comes from Slurm and its run folder, never from the sweep's folder, so a killed process loses nothing.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from launch.executors import slurm, slurm_client
from launch.executors.executor import JobStatus
from launch.executors.local import start_time
from launch.executors.record import JobRecord, read_record, write_record
from launch.executors.slurm import HetSlurmJob
from launch.runs import folder_lock, run_setup
from launch.sweeps import suite as suites
from launch.sweeps.suite import Suite
from pipeline.config import Problem, RecipeError
from pipeline.files import small_files
from pipeline.files.storage import StorageError, wait_for, write_durably
from pipeline.recipe.values import leaves

JOBS = "jobs.jsonl"
CANCELLED = "cancelled"
"""The file that makes the process that works on the sweep end."""
SETTLE_S = 5.0
"""Seconds that done.json may take to appear on a shared file system after the job has ended."""
PROBE_S = 2.0
"""Seconds to wait for the lock, which other programs hold for a moment to see whether a process works on the sweep."""
LOCK_S = 600.0
"""Seconds that the check waits for the lock of a process that submits jobs."""
PAUSES_S = (5, 15)
"""Seconds between two queries of a Slurm that does not answer."""


@dataclass(frozen=True)
class SweepJob:
    """A run with one seed, or a needed recipe, which runs once for all runs that need it."""

    name: str
    recipe: str
    overrides: list[str]
    run_dir: str  # absolute
    run: str | None = None  # None if other jobs need this one
    seed: int | None = None
    needs: list[str] = field(default_factory=list)  # names of jobs

    def __str__(self) -> str:
        after = f"  after {', '.join(self.needs)}" if self.needs else ""
        return f"{self.name}: recipe={self.recipe} {' '.join(self.overrides)}{after}"


@dataclass(frozen=True)
class SweepPlan:
    """The contents of sweep.json, written when the sweep begins."""

    id: str
    executor: str  # slurm, local
    cwd: str  # base of the recipes' relative paths
    baseline: str
    overrides: list[str]  # overrides of the command line, for every recipe
    jobs: list[SweepJob]
    update_baseline: bool = False


@dataclass(frozen=True)
class Submission:
    """Holds a line of jobs.jsonl: one submission of a job."""

    job: str  # a job's name
    job_id: str
    time: float
    after: list[str] = field(default_factory=list)  # of a retry: why the previous try failed, in lines


@dataclass(frozen=True)
class JobState:
    """Holds the state of a job, with its latest submission."""

    job: SweepJob
    state: str  # missing (never submitted), live, done or failed
    record: JobRecord | None = None  # of the latest submission
    status: JobStatus | None = None  # of the latest submission
    tries: int = 0


class SweepFolder:
    """One sweep's folder, which may not exist yet."""

    def __init__(self, path: Path):
        self.path = path.absolute()

    @property
    def title(self) -> str:
        """Name and id of the sweep."""
        return f"{self.path.parent.name} {self.path.name}"

    # ---- suite and jobs -------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Return whether sweep.json exists, and so the sweep has begun."""
        return (self.path / "sweep.json").exists()

    @property
    def plan(self) -> SweepPlan:
        """The contents of sweep.json. Raises RecipeError if there is none."""
        plan = small_files.read(self.path / "sweep.json", SweepPlan, "check", "Try to restore it from a copy")
        if plan is None:
            message = f"{self.path} is not a sweep's folder: it has no sweep.json"
            raise RecipeError(Problem("check", "not-a-run", message))
        return plan

    @property
    def suite(self) -> Suite:
        """The resolved suite. Raises RecipeError."""
        return suites.read(self.path / "suite.yaml")

    def begin(self, suite: Suite, plan: SweepPlan) -> None:
        """Write the suite, then sweep.json, whose presence means that the sweep has begun."""
        write_durably(self.path / "suite.yaml", suites.to_yaml(suite))
        small_files.write(self.path / "sweep.json", asdict(plan))

    def request_baseline(self, requested: bool) -> None:
        """Set whether the check writes a new baseline."""
        small_files.write(self.path / "sweep.json", {**asdict(self.plan), "update_baseline": requested})

    def add_job(self, job: SweepJob) -> None:
        """Add a job to sweep.json, before its submission; a job of the same name is replaced."""
        plan = self.plan
        jobs = [*(planned for planned in plan.jobs if planned.name != job.name), job]
        small_files.write(self.path / "sweep.json", asdict(replace(plan, jobs=jobs)))

    def refuse_other(self, suite: Suite, overrides: list[str]) -> None:
        """Raise RecipeError if the sweep in this folder began with another suite, or with other overrides."""
        before = {**dict(leaves(asdict(self.suite))), "the command line": self.plan.overrides}
        now = {**dict(leaves(asdict(suite))), "the command line": overrides}
        for key in [*now, *before]:
            if now.get(key) != before.get(key):
                expected = f"expected {before.get(key)}, with which {self.path} began. Try this value, or another id=NAME"
                raise RecipeError(Problem(key, "run-exists", f"got {now.get(key)}; {expected}"))

    def locked(self, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Create the folder if necessary, and lock it during the block. Raises RecipeError if another process holds it."""
        return folder_lock.hold_lock(self.path, "folder", wait_s)

    # ---- cancelling -----------------------------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Return whether somebody has cancelled the sweep since it was last begun or continued."""
        return (self.path / CANCELLED).exists()

    def cancel(self) -> None:
        """Make the process that works on the sweep, on any machine, submit nothing more and end."""
        write_durably(self.path / CANCELLED, "cancelled; the same command continues the sweep\n")

    def take_up(self) -> None:
        """Remove the mark of a cancelled sweep, because the sweep continues. The caller holds the lock."""
        (self.path / CANCELLED).unlink(missing_ok=True)

    def refuse_cancelled(self) -> None:
        """Raise RecipeError if the sweep has been cancelled."""
        if self.cancelled:
            message = f"{self.path} was cancelled. Try the command that began the sweep, to continue it"
            raise RecipeError(Problem("id", "not-running", message))

    # ---- submissions ----------------------------------------------------------------------------------------------------

    def submissions(self, job: str) -> list[Submission]:
        """Return a job's submissions, oldest first. Skips an incomplete last line, whose job the run folder records too."""
        return [submission for submission in small_files.lines(self.path / JOBS, Submission, "check") if submission.job == job]

    def record(self, job: str, job_id: str, after: list[str] | None = None) -> None:
        """Append a submission to jobs.jsonl. after: for a retry, the lines that say why the previous try failed."""
        small_files.append(self.path / JOBS, asdict(Submission(job, job_id, time.time(), after or [])))

    # ---- states ---------------------------------------------------------------------------------------------------------

    def job_states(self, jobs: Iterable[SweepJob] | None = None, queue: Queue | None = None) -> list[JobState]:
        """Return the states of jobs; None: of all jobs. Raises RecipeError if jobs cannot be queried from here.

        queue: one that was read already, in place of a new one.
        """
        plan = self.plan
        queue = queue or Queue(plan.executor)
        return [self._job_state(job, queue) for job in (plan.jobs if jobs is None else jobs)]

    def _job_state(self, job: SweepJob, queue: Queue) -> JobState:
        run_dir = Path(job.run_dir)
        ids = [submission.job_id for submission in self.submissions(job.name)]
        record = read_record(run_dir)
        if record is not None and job.run is not None and record.job_id not in ids:
            ids.append(record.job_id)  # its submitter was killed before `record`; nothing else writes into this folder
        if run_setup.ended_well(run_dir) if job.run is not None else run_setup.done_step(run_dir) is not None:
            return JobState(job, "done", record, None, len(ids))
        status = queue.of(record, run_dir) if record else None
        if status and not status.ended:
            return JobState(job, "live", record, status, max(1, len(ids)))
        if orphan := queue.writing_into(run_dir):  # its submitter was killed before it wrote job.json
            write_record(run_dir, orphan)
            return JobState(job, "live", orphan, queue.of(orphan, run_dir), len(ids) + 1)
        if status and status.succeeded:
            with contextlib.suppress(StorageError):
                wait_for(run_dir / "done.json", SETTLE_S)
                return JobState(job, "done", record, status, len(ids))
        if record is None or record.job_id not in ids:  # the record is of a job before this sweep
            return JobState(job, "missing")
        return JobState(job, "failed", record, status, len(ids))

    def check_job(self, other_than: str | None = None, queue: Queue | None = None) -> str | None:
        """Return the id of the live Slurm job that will check the gates; None if there is none.

        other_than: the id of a job to ignore. queue: as for `job_states`.
        """
        return (queue or Queue("slurm")).writing_to(re.escape(str(self.path / "check.log")), other_than)


# ---- states of jobs -----------------------------------------------------------------------------------------------------


class Queue:
    """Holds the states of all jobs, read with one command at the first query, because a command for each job is slow.

    Jobs are also found by the files that they write: if a submitter is killed between sbatch and its record, the run folder
    does not know the job, and it would be submitted twice.
    """

    def __init__(self, executor: str):
        self._executor = executor

    @functools.cached_property
    def _jobs(self) -> dict[str, list[slurm_client.JobComponent]]:
        """Hold job id -> its components. Retries while Slurm does not answer, then raises RecipeError."""
        jobs = defaultdict(list)
        for part in slurm_client.read_jobs(_scontrol()):
            jobs[part.job_id].append(part)
        return jobs

    def status(self, job_id: str) -> JobStatus:
        """Return the status of a Slurm job; GONE if neither slurmctld nor accounting knows it."""
        if parts := self._jobs.get(job_id):
            return slurm.job_status(slurm_client.merge_components(parts))
        return HetSlurmJob(".", job_id).status()  # slurmctld has forgotten it; accounting may know it

    def of(self, record: JobRecord, run_dir: Path) -> JobStatus:
        """Return the status of a recorded job."""
        return self.status(record.job_id) if self._executor == "slurm" else record.attach(run_dir).status(now=True)

    def writing_into(self, run_dir: Path) -> JobRecord | None:
        """Return the live job that writes into a run folder, even if the folder has no record of it; None if there is none."""
        if self._executor == "slurm":
            job_id = self.writing_to(re.escape(f"{run_dir}/submitit/") + r"\d+_0_log\.out")
            return JobRecord("slurm", job_id, socket.gethostname()) if job_id else None
        ends_with = ["-m", "launch.executors.local", str(run_dir)]
        for process in psutil.process_iter(["cmdline"]):  # without a command line, if it has ended or belongs to another user
            if (process.info["cmdline"] or [])[-3:] == ends_with:
                return JobRecord("local", str(process.pid), socket.gethostname(), start_time(process.pid))
        return None

    def writing_to(self, output: str, other_than: str | None = None) -> str | None:
        """Return the id of the live Slurm job, not `other_than`, whose log's path matches a pattern; None if there is none."""
        for job_id, parts in self._jobs.items():
            matches = any(re.fullmatch(output, part.output) for part in parts if part.output)
            if matches and job_id != other_than and not self.status(job_id).ended:
                return job_id
        return None


def _scontrol() -> str:
    for pause in (*PAUSES_S, None):
        try:
            return slurm_client.run_command("scontrol", "show", "job", "-o")
        except slurm_client.SlurmError as error:
            if error.kind == "missing" or pause is None:
                message = f"the states of the sweep's jobs are unknown: {error}"
                raise RecipeError(Problem("", "unreachable", message)) from None
            time.sleep(pause)
    raise AssertionError("the last pause is None")
