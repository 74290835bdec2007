"""The jobs that are under way, asked for all at once, because a sweep has many and asking for each is slow.

Jobs are also found by the files that they write: a run folder does not know a job whose submitter was killed between sbatch and
its note there, and would be submitted to a second time.
"""

from __future__ import annotations

import functools
import re
import socket
import time
from collections import defaultdict
from pathlib import Path

from launch import slurm_client
from launch.executors import slurm
from launch.executors.base import JobStatus
from launch.executors.local import start_time
from launch.executors.record import JobRecord
from launch.executors.slurm import HetSlurmJob
from pipeline.config import Problem, RecipeError

PAUSES_S = (5, 15)


class Queue:
    """The state of all jobs when it is first asked for."""

    def __init__(self, executor: str):
        self._executor = executor

    @functools.cached_property
    def _seen(self) -> tuple[dict[str, JobStatus], list[tuple[str, str]]]:
        """Return (status by job id, (job id, path of its log) of each). Raises RecipeError where Slurm cannot be asked."""
        jobs = defaultdict(list)
        for part in slurm_client.read_jobs(_scontrol()):
            jobs[part.job_id].append(part)
        outputs = [(part.job_id, part.output) for parts in jobs.values() for part in parts if part.output]
        return {job_id: slurm.job_status(slurm_client.merged(parts)) for job_id, parts in jobs.items()}, outputs

    def status(self, job_id: str) -> JobStatus:
        """Return the status of a Slurm job."""
        known, _ = self._seen
        if job_id not in known:
            known[job_id] = HetSlurmJob(".", job_id).status()  # forgotten by slurmctld; perhaps accounting knows
        return known[job_id]

    def of(self, record: JobRecord, run_dir: Path) -> JobStatus:
        return self.status(record.job_id) if self._executor == "slurm" else record.attach(run_dir).status(now=True)

    def writing_into(self, run_dir: Path) -> JobRecord | None:
        """Return the live job that was submitted for this run folder, whether the folder knows of it or not."""
        if self._executor == "slurm":
            found = self.writing_to(re.compile(re.escape(f"{run_dir}/submitit/") + r"\d+_0_log\.out"))
            return JobRecord("slurm", found, socket.gethostname()) if found else None
        controller = _controller(run_dir)
        return JobRecord("local", str(controller), socket.gethostname(), start_time(controller)) if controller else None

    def writing_to(self, output: re.Pattern[str], but: str | None = None) -> str | None:
        """Return the id of the live Slurm job whose log has such a path, another one than `but`."""
        known, outputs = self._seen
        ids = [job_id for job_id, path in outputs if output.fullmatch(path) and job_id != but]
        return next((job_id for job_id in ids if not known[job_id].ended), None)


def _scontrol() -> str:
    """Return what it says of all jobs. A controller that is just being restarted is given a moment. Raises RecipeError."""
    for pause in (*PAUSES_S, None):
        try:
            return slurm_client.run_command("scontrol", "show", "job", "-o")
        except slurm_client.SlurmError as error:
            if error.kind == "missing" or pause is None:
                why = f"the sweep runs on Slurm, which does not say what has become of it: {error}"
                raise RecipeError(Problem("", "unreachable", why)) from None
            time.sleep(pause)
    raise AssertionError("the last pause is None")


def _controller(run_dir: Path) -> int | None:
    """Return the process id of launch/executors/local.py's controller for this folder."""
    ends_with = b"\0".join([b"-m", b"launch.executors.local", str(run_dir).encode(), b""])
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(ends_with):
                return int(path.parent.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended meanwhile, or is not ours
    return None
