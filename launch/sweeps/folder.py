"""A sweep's own folder: its suite and jobs, what was submitted when, and the state of each job.

    runs/sweeps/<name>/<id>/
      suite.yaml     resolved                       check.sh, check.log   the job that judges at the end
      sweep.json     its jobs, where and by whom    verdict.json          what came of every gate
      jobs.jsonl     a line per submission          junit.xml, report.md, report.html
      runs/<run>-<seed>/                            the run folders
Slurm and the run folder tell whether a job runs or has ended. The sweep's folder does not remember it, so that nothing is lost
with the process that submitted it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch import folder_lock, run_setup
from launch.executors.base import JobStatus, write_json
from launch.executors.record import JobRecord, read_record, write_record
from launch.run_setup import flat
from launch.sweeps import suite as suites
from launch.sweeps.queue import Queue
from launch.sweeps.suite import Suite
from pipeline.config import Problem, RecipeError
from pipeline.storage import listed, write_durably

SETTLE_S = 5.0
"""How long done.json may lag behind the job's end on a shared file system."""
LOCK_S = 600.0
"""How long the check waits for someone who is just submitting."""


@dataclass(frozen=True)
class SweepJob:
    """One run of one seed; or a recipe that such runs need, which is run once for all."""

    name: str
    recipe: str
    overrides: list[str]
    run_dir: str  # absolute
    run: str | None = None  # None: needed by others
    seed: int | None = None
    needs: list[str] = field(default_factory=list)  # names of jobs


@dataclass(frozen=True)
class SweepPlan:
    """sweep.json: what was decided when the sweep was begun."""

    id: str
    executor: str  # slurm, local
    cwd: str  # where recipes' relative paths begin
    baseline: str
    overrides: list[str]  # of the command line, for every recipe
    jobs: list[SweepJob]
    update_baseline: bool = False


@dataclass(frozen=True)
class Submission:
    """A line of jobs.jsonl."""

    job: str  # a job's name
    job_id: str
    time: float
    after: list[str] = field(default_factory=list)  # of a retry: why its predecessor failed, in lines


@dataclass(frozen=True)
class JobState:
    """The state of a job."""

    job: SweepJob
    state: str  # missing: never submitted; live; done; failed
    record: JobRecord | None = None  # of the latest submission
    status: JobStatus | None = None  # of that
    tries: int = 0


class SweepFolder:
    def __init__(self, path: Path):
        self.path = path.absolute()

    @property
    def title(self) -> str:
        return f"{self.path.parent.name} {self.path.name}"

    # ---- suite and jobs -------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        return (self.path / "sweep.json").exists()

    @property
    def plan(self) -> SweepPlan:
        """Raises RecipeError where there is none."""
        if not self.begun:
            why = f"{self.path} is not the folder of a sweep: it has no sweep.json"
            raise RecipeError(Problem("check", "not-a-run", why))
        said = json.loads((self.path / "sweep.json").read_text())
        return SweepPlan(**{**said, "jobs": [SweepJob(**job) for job in said["jobs"]]})

    @property
    def suite(self) -> Suite:
        return suites.read(self.path / "suite.yaml")

    def begin(self, suite: Suite, plan: SweepPlan) -> None:
        """Write the suite and, last, sweep.json: with it the folder is complete."""
        write_durably(self.path / "suite.yaml", suites.to_yaml(suite))
        write_json(self.path / "sweep.json", asdict(plan))

    def want_baseline(self, wanted: bool) -> None:
        """Set whether the check writes a new baseline."""
        write_json(self.path / "sweep.json", {**asdict(self.plan), "update_baseline": wanted})

    def refuse_other(self, suite: Suite, overrides: list[str]) -> None:
        """Raises RecipeError if the sweep in this folder was begun with another suite."""
        before = {**flat(asdict(self.suite)), "the command line": self.plan.overrides}
        now = {**flat(asdict(suite)), "the command line": overrides}
        for key in [*now, *before]:
            if now.get(key) != before.get(key):
                there = f"{self.path} was begun with {before.get(key)}; give that, or begin another with id=NAME"
                raise RecipeError(Problem(key, "run-exists", f"got {now.get(key)}; {there}"))

    @contextlib.contextmanager
    def locked(self, wait_s: float = 0.0) -> Iterator[None]:
        """Create the folder if need be, and hold it. Raises RecipeError if another process has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(folder_lock.unwritable(self.path, "folder", error)) from None
        with folder_lock.held(self.path, "folder", wait_s):
            yield

    # ---- what was submitted ---------------------------------------------------------------------------------------------

    def submissions(self, job: str) -> list[Submission]:
        """Return those of one job, oldest first. A line that a kill cut short is left out: its run folder knows the job."""
        path = self.path / "jobs.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [Submission(**json.loads(line)) for line in lines if line.startswith("{") and line.endswith("}")]
        return [each for each in found if each.job == job]

    def record(self, job: str, job_id: str, after: list[str] | None = None) -> None:
        with open(self.path / "jobs.jsonl", "a+b") as file:
            file.seek(max(0, file.seek(0, 2) - 1))
            cut = file.read(1) not in (b"", b"\n")  # by a kill: begin a line of our own
            line = json.dumps(asdict(Submission(job, job_id, time.time(), after or [])))
            file.write(f"{chr(10) if cut else ''}{line}\n".encode())

    # ---- states ---------------------------------------------------------------------------------------------------------

    def job_states(self, queue: Queue) -> list[JobState]:
        """Raises RecipeError where it cannot be told from here."""
        return [self._standing(job, queue) for job in self.plan.jobs]

    def _standing(self, job: SweepJob, queue: Queue) -> JobState:
        run_dir = Path(job.run_dir)
        ids = [each.job_id for each in self.submissions(job.name)]
        record = read_record(run_dir)
        if record is not None and job.run is not None and record.job_id not in ids:
            ids.append(record.job_id)  # killed before it could note the submission; nobody else writes into this folder
        if run_setup.ended_well(run_dir) if job.run is not None else run_setup.done_step(run_dir) is not None:
            return JobState(job, "done", record, None, len(ids))
        status = queue.of(record, run_dir) if record else None
        if status and not status.ended:
            return JobState(job, "live", record, status, max(1, len(ids)))
        if orphan := queue.writing_into(run_dir):  # its submitter was killed before it could say so
            write_record(run_dir, orphan)
            return JobState(job, "live", orphan, queue.of(orphan, run_dir), len(ids) + 1)
        if status and status.succeeded and _seen_late(run_dir / "done.json"):
            return JobState(job, "done", record, status, len(ids))
        if record is None or record.job_id not in ids:  # or one that had failed before this sweep began
            return JobState(job, "missing")
        return JobState(job, "failed", record, status, len(ids))

    def check_job(self, queue: Queue, but: str | None = None) -> str | None:
        """Return the id of the live Slurm job that will judge, another one than `but`."""
        return queue.writing_to(re.compile(re.escape(str(self.path / "check.log"))), but)


def _seen_late(path: Path) -> bool:
    """Return whether a file that another node may just have written comes into sight."""
    deadline = time.monotonic() + SETTLE_S
    while not (there := listed(path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return there
