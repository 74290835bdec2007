"""What the two executors have in common: the components of a job, its status, and how a run folder remembers its job.

Every rank, under either executor, is started with
    HETSTEP_RUN_DIR      the run folder, absolute
    HETSTEP_RANK         global: the ranks of train, then those of generate, then those of reward
    HETSTEP_WORLD_SIZE   ranks of all components
    HETSTEP_LOCAL_RANK   on its node, within its component
    HETSTEP_MASTER_ADDR  a host that rank 0 runs on
    HETSTEP_ATTEMPT      unique for each start of the ranks; its logs are in attempts/<attempt>/rank00000.log ...
    HETSTEP_COMPONENT    train, generate, reward
    HETSTEP_NODE         the name of its node
    HETSTEP_JOB_ID       Slurm's, of the leading component; or the process id of the local controller
    HETSTEP_END_TIME     unix seconds when the allocation ends; empty if it has no limit
    HETSTEP_SIGNALS      under Slurm alone: the file in which rank 0 finds signals, see pipeline/signals.py
"""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from launch import cuda_variables
from launch.nodes import Guest
from launch.slurm_client import cluster_name
from pipeline import config
from pipeline.config import ComponentConfig, Recipe, RecipeError, colocated, uses_megatron
from pipeline.files import wait_for, write_durably

ROOT = Path(__file__).parent.parent
"""What ranks find `launch` and `pipeline` by."""
REPORT = "hetstep:"
"""What a line of a Slurm batch's log begins with that is ours."""


@dataclass(frozen=True)
class JobStatus:
    state: str  # Slurm's word, or the same word for a local job; GONE: nobody knows it any more
    reason: str = ""  # why it waits, or why it ended
    ended: bool = False

    @property
    def succeeded(self) -> bool:
        return self.state == "COMPLETED"

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


class RunJob(Protocol):
    """A submitted job, as `follow` needs it."""

    job_id: str
    start_time: int | None  # as in JobRecord

    def status(self, now: bool = False) -> JobStatus:
        """`now`: ask, however recently it was asked."""

    def cancel(self, check: bool = True) -> None: ...

    def name(self) -> str:
        """For people, e.g. `Slurm job 17`."""


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
            from launch.slurm import HetSlurmJob

            here = cluster_name() if self.cluster else None
            if here not in (None, self.cluster):
                raise RecipeError(
                    f"run_dir: {run_dir} was last written by Slurm job {self.job_id} of the cluster {self.cluster}, and this is"
                    f" the cluster {here}; go on from there, or, if that job has ended, delete {run_dir}/job.json"
                )
            return HetSlurmJob(run_dir / "submitit", self.job_id)
        from launch.allocation import AllocationJob
        from launch.local import HetLocalJob

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


def write_json(path: Path, value: object) -> None:
    """Readers see the old file or the new one, never a part."""
    write_durably(path, json.dumps(value, indent=1) + "\n")


def own_pickle(folder: Path, job_id: str) -> None:
    """Wait for the function that was submitted, as a rank is about to load it from submitit's `folder` of the run folder.

    Raises PermissionError if somebody else could have put it there: a pickle runs whatever is in it.
    """
    pickle = folder / f"{job_id}_submitted.pkl"
    wait_for(pickle)
    for path in (folder.parent, folder, pickle):
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(
                f"{path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}: others than user"
                f" {os.geteuid()} could have put code there for this rank to run, so it does not"
            )


def components(recipe: Recipe) -> dict[str, ComponentConfig]:
    """The job's components, in rank order, with what concerns all of them; their own goes before that.

    Backends' variables are set before Python starts: some are read on import.
    """
    own = (recipe.policy.megatron_cfg.env_vars or {}) if uses_megatron(recipe.policy) else {}
    trainers = cuda_variables.of_train_ranks(recipe) | own
    variables = {"train": trainers, "generate": recipe.policy.generation.vllm_cfg.env_vars, "reward": trainers}
    options = recipe.cluster.sbatch_options
    parts = {
        name: replace(part, env_vars={**variables[name], **part.env_vars}, sbatch_options={**options, **part.sbatch_options})
        for name, part in config.components(recipe).items()
    }
    guests = ("generate",) if colocated(recipe) else tuple(parts)[1:] if recipe.cluster.share_nodes else ()
    return parts | {name: Guest(**vars(parts[name]), takes_turns=colocated(recipe)) for name in guests}
