"""Define what all executors share: a job's status, the environment of each rank, and processes that outlive the launcher.

Every executor starts every rank with these variables:
    HETSTEP_RUN_DIR      the run folder, absolute
    HETSTEP_RANK         global rank: train ranks first, then generate, then reward
    HETSTEP_WORLD_SIZE   number of ranks of all components
    HETSTEP_LOCAL_RANK   index on its node, within its component
    HETSTEP_MASTER_ADDR  host of rank 0
    HETSTEP_ATTEMPT      id of the attempt; logs are in attempts/<attempt>/rank00000.log ...
    HETSTEP_COMPONENT    train, generate or reward
    HETSTEP_NODE         name of its node
    HETSTEP_JOB_ID       Slurm's id of the leading component, or the local controller's process id
    HETSTEP_END_TIME     unix seconds at which the allocation ends; empty without a limit
    HETSTEP_SIGNALS      the file from which rank 0 reads signals, see pipeline/job/signals.py
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from pipeline.files.storage import wait_for
from pipeline.node.python_path import ROOT as ROOT

REPORT = "hetstep:"
"""The prefix of Hetstep's own lines in the log of a batch script."""


@dataclass(frozen=True)
class JobStatus:
    """The state of a job as a whole."""

    state: str  # a state of Slurm, also for local jobs; GONE if Slurm no longer knows the job
    reason: str = ""  # why it waits or has ended
    ended: bool = False

    @property
    def succeeded(self) -> bool:
        """Return whether the job ended without an error."""
        return self.state == "COMPLETED"

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


@runtime_checkable
class RunJob(Protocol):
    """The interface of a submitted job."""

    @property
    def job_id(self) -> str:
        """Slurm's id of the leading component, or the process id of the controller."""
        ...

    @property
    def start_time(self) -> int | None:
        """The controller's start time, as in JobRecord."""
        ...

    def status(self, now: bool = False) -> JobStatus:
        """Return the job's status. now: whether to query it again instead of returning a cached status."""
        ...

    def cancel(self, check: bool = True) -> None:
        """Cancel the job. check: whether to raise an error if the cancellation fails."""
        ...

    def name(self) -> str:
        """Return the job's name for people, such as `Slurm job 17`."""
        ...


def start_detached(command: Sequence[str], output: BinaryIO, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to an open file, and return its process. Raises OSError if it cannot start.

    The process reads nothing and leads a session, so the signals of a terminal do not reach it and can be sent to its group.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env=environment,
    )


def own_pickle(folder: Path, job_id: str) -> None:
    """Wait for the pickled function in submitit's `folder`, and check that only this user could write it.

    Raises PermissionError if another user could write it, because loading a pickle runs code.
    """
    pickle = folder / f"{job_id}_submitted.pkl"
    wait_for(pickle)
    for path in (folder.parent, folder, pickle):
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(
                f"{path}: got owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}; expected a file that only user"
                f" {os.geteuid()} can write, because this rank runs its code"
            )
