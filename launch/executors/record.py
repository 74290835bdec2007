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
from pipeline.config import RecipeError


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
        """A handle on that job. Raises RecipeError where it cannot be asked from this machine."""
        if self.executor == "slurm":
            here = cluster_name() if self.cluster else None
            if here not in (None, self.cluster):
                raise RecipeError(
                    f"run_dir: {run_dir} was last written by Slurm job {self.job_id} of the cluster {self.cluster}, and this is"
                    f" the cluster {here}; go on from there, or, if that job has ended, delete {run_dir}/job.json"
                )
            return HetSlurmJob(run_dir / "submitit", self.job_id)
        if self.host != socket.gethostname():
            raise RecipeError(
                f"run_dir: {run_dir} was last written by process {self.job_id} on {self.host}; go on from there, or, if"
                f" that process has ended, delete {run_dir}/job.json"
            )
        kind = AllocationJob if self.executor == "allocation" else HetLocalJob
        return kind(run_dir / "submitit", self.job_id, start_time=self.start_time)


def read_record(run_dir: Path) -> JobRecord | None:
    path = run_dir / "job.json"
    return JobRecord(**json.loads(path.read_text())) if path.exists() else None


def write_record(run_dir: Path, record: JobRecord) -> None:
    write_json(run_dir / "job.json", asdict(record))
