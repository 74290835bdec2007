"""Query the states of all jobs of a sweep with one command, because a query for each job is slow.

Jobs are also found by the files that they write. If a submitter is killed between sbatch and its record, the run folder does
not know the job, and the job would be submitted twice.
"""

from __future__ import annotations

import functools
import re
import socket
import time
from collections import defaultdict
from pathlib import Path

from launch.executors import slurm, slurm_client
from launch.executors.executor import JobStatus
from launch.executors.local import start_time
from launch.executors.record import JobRecord
from launch.executors.slurm import HetSlurmJob
from pipeline.config import Problem, RecipeError

PAUSES_S = (5, 15)


class Queue:
    """Holds the states of all jobs, cached at the first query."""

    def __init__(self, executor: str):
        self._executor = executor

    @functools.cached_property
    def _jobs(self) -> tuple[dict[str, JobStatus], list[tuple[str, str]]]:
        """Hold (job id -> status, a list of (job id, path of the job's log)). Raises RecipeError if Slurm does not answer."""
        jobs = defaultdict(list)
        for part in slurm_client.read_jobs(_scontrol()):
            jobs[part.job_id].append(part)
        outputs = [(part.job_id, part.output) for parts in jobs.values() for part in parts if part.output]
        return {job_id: slurm.job_status(slurm_client.merge_components(parts)) for job_id, parts in jobs.items()}, outputs

    def status(self, job_id: str) -> JobStatus:
        """Return the status of a Slurm job; GONE if neither slurmctld nor accounting knows it."""
        statuses, _ = self._jobs
        if job_id not in statuses:
            statuses[job_id] = HetSlurmJob(".", job_id).status()  # slurmctld has forgotten it; accounting may know it
        return statuses[job_id]

    def of(self, record: JobRecord, run_dir: Path) -> JobStatus:
        """Return the status of a recorded job."""
        return self.status(record.job_id) if self._executor == "slurm" else record.attach(run_dir).status(now=True)

    def writing_into(self, run_dir: Path) -> JobRecord | None:
        """Return the live job that writes into a run folder; None if there is none.

        The job is found even if the folder has no record of it.
        """
        if self._executor == "slurm":
            job_id = self.writing_to(re.compile(re.escape(f"{run_dir}/submitit/") + r"\d+_0_log\.out"))
            return JobRecord("slurm", job_id, socket.gethostname()) if job_id else None
        controller = _controller(run_dir)
        return JobRecord("local", str(controller), socket.gethostname(), start_time(controller)) if controller else None

    def writing_to(self, output: re.Pattern[str], other_than: str | None = None) -> str | None:
        """Return the id of the live Slurm job whose log has a path that matches `output`; None if there is none.

        other_than: the id of a job to ignore.
        """
        statuses, outputs = self._jobs
        ids = [job_id for job_id, path in outputs if output.fullmatch(path) and job_id != other_than]
        return next((job_id for job_id in ids if not statuses[job_id].ended), None)


def _scontrol() -> str:
    """Return the output of `scontrol show job`. Retries while Slurm does not answer, then raises RecipeError."""
    for pause in (*PAUSES_S, None):
        try:
            return slurm_client.run_command("scontrol", "show", "job", "-o")
        except slurm_client.SlurmError as error:
            if error.kind == "missing" or pause is None:
                message = f"the states of the sweep's jobs are unknown: {error}"
                raise RecipeError(Problem("", "unreachable", message)) from None
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def _controller(run_dir: Path) -> int | None:
    """Return the process id of the local executor's controller of a run folder; None if there is none."""
    ends_with = b"\0".join([b"-m", b"launch.executors.local", str(run_dir).encode(), b""])
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(ends_with):
                return int(path.parent.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or belongs to another user
    return None
