"""Read and write job.json, which records the job that writes into a run folder."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.executors.allocation import AllocationJob
from launch.executors.executor import RunJob
from launch.executors.local import HetLocalJob
from launch.executors.slurm import HetSlurmJob
from launch.executors.slurm_client import cluster_name
from pipeline.config import Problem, RecipeError
from pipeline.files import small_files

REMEDY = "Try to delete the file when no job writes into the folder. The same command then continues from the last checkpoint"


@dataclass(frozen=True)
class JobRecord:
    """The contents of job.json: the job that writes into a run folder, or was the last to."""

    executor: str  # slurm, allocation, local
    job_id: str
    host: str
    start_time: int | None = None  # of a local controller, in ticks after boot, because process ids are reused
    cluster: str | None = None  # of a Slurm job, because each cluster has its own ids; None if unknown, as in older records

    @classmethod
    def of(cls, executor: str, job: RunJob) -> JobRecord:
        """Return the record of a job that was just submitted from this machine."""
        cluster = cluster_name() if executor == "slurm" else None
        return cls(executor, job.job_id, socket.gethostname(), job.start_time, cluster)

    def attach(self, run_dir: Path) -> RunJob:
        """Return the recorded job. Raises RecipeError if it cannot be queried from this machine."""
        if self.executor == "slurm":
            here = cluster_name() if self.cluster else None
            if here not in (None, self.cluster):
                whose = f"Slurm job {self.job_id} on the cluster {self.cluster}, but this is the cluster {here}"
                raise RecipeError(_elsewhere(run_dir, whose))
            return HetSlurmJob(run_dir / "submitit", self.job_id)
        if self.host != socket.gethostname():
            raise RecipeError(_elsewhere(run_dir, f"process {self.job_id} on {self.host}"))
        kind = AllocationJob if self.executor == "allocation" else HetLocalJob
        return kind(run_dir / "submitit", self.job_id, start_time=self.start_time)


def _elsewhere(run_dir: Path, whose: str) -> Problem:
    hint = f"Try the same command there. If the job has ended, delete {run_dir}/job.json"
    return Problem("run_dir", "unreachable", f"the last job that wrote into {run_dir} is {whose}. {hint}")


def read_record(run_dir: Path) -> JobRecord | None:
    """Return the record of a run folder's last job; None before the first."""
    return small_files.read(run_dir / "job.json", JobRecord, "run_dir", REMEDY)


def write_record(run_dir: Path, record: JobRecord) -> None:
    """Write job.json."""
    small_files.write(run_dir / "job.json", asdict(record))
