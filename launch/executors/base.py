"""The base of all executors: a job's status, and the environment that each rank starts with.

Every rank, under each executor, is started with
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
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.storage import wait_for, write_durably

ROOT = Path(__file__).parents[2]
"""The folder from which ranks import `launch` and `pipeline`."""
REPORT = "hetstep:"
"""The prefix of Hetstep's own lines in the log of a batch script."""


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
        """Return the job's name for people, such as `Slurm job 17`."""


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
