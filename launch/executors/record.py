"""job.json: how a run folder remembers the job that writes into it."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.executors.allocation import AllocationJob
from launch.executors.base import RunJob, write_json
from launch.executors.local import HetLocalJob
from launch.executors.slurm import HetSlurmJob
from launch.slurm_client import cluster_name
from pipeline.config import Problem, RecipeError


@dataclass(frozen=True)
class JobRecord:
    """job.json: which job writes, or wrote last, into a run folder."""

    executor: str  # slurm, allocation, local
    job_id: str
    host: str
    start_time: int | None = None  # not slurm: of the controller, in ticks after boot, because a process id is used again
    cluster: str | None = None  # slurm: each cluster counts its jobs by itself; None: not known, as in older records

    @classmethod
    def of(cls, executor: str, job: RunJob) -> JobRecord:
        cluster = cluster_name() if executor == "slurm" else None
        return cls(executor, job.job_id, socket.gethostname(), job.start_time, cluster)

    def attach(self, run_dir: Path) -> RunJob:
        """Return a handle on that job. Raises RecipeError where it cannot be asked from this machine."""
        if self.executor == "slurm":
            here = cluster_name() if self.cluster else None
            if here not in (None, self.cluster):
                whose = f"Slurm job {self.job_id} of the cluster {self.cluster}, and this is the cluster {here}"
                raise RecipeError(_elsewhere(run_dir, whose))
            return HetSlurmJob(run_dir / "submitit", self.job_id)
        if self.host != socket.gethostname():
            raise RecipeError(_elsewhere(run_dir, f"process {self.job_id} on {self.host}"))
        kind = AllocationJob if self.executor == "allocation" else HetLocalJob
        return kind(run_dir / "submitit", self.job_id, start_time=self.start_time)


def _elsewhere(run_dir: Path, whose: str) -> Problem:
    hint = f"Try to go on from there, or, if that has ended, delete {run_dir}/job.json"
    return Problem("run_dir", "unreachable", f"{run_dir} was last written by {whose}. {hint}")


def read_record(run_dir: Path) -> JobRecord | None:
    path = run_dir / "job.json"
    return JobRecord(**json.loads(path.read_text())) if path.exists() else None


def write_record(run_dir: Path, record: JobRecord) -> None:
    write_json(run_dir / "job.json", asdict(record))
