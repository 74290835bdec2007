"""Run README's command in each situation of a user's shell, and return what `cluster.executor=auto` chooses."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.executors.executor import ROOT
from tests.slurm.cluster import SlurmCluster

SLURM = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab", "sdiag", "sinfo"),
    *("sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)
"""Commands that a machine without Slurm does not have."""
ALLOCATION = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--immediate=30")


@dataclass(frozen=True)
class Situation:
    """A shell's surroundings, and what `auto` must choose there."""

    name: str
    chosen: str  # slurm, allocation, local
    says: str  # a part of the reason
    environment: dict[str, str | None]  # None: not set
    inside: tuple[str, ...] = ()  # the command that the shell is inside of


def first_commands() -> list[str]:
    """Return the commands of README's first shell block, without comments: set-up, then a run."""
    text = (ROOT / "README.md").read_text().partition("```sh\n")[2].partition("```")[0]
    return [command for line in text.splitlines() if (command := line.partition("#")[0].strip())]


def first_run() -> list[str]:
    """Return the arguments of launch/submit.py in README's first command that runs something."""
    python, script, *arguments = shlex.split(first_commands()[1])
    assert (python, script) == (".venv/bin/python", "launch/submit.py")
    return arguments


def without_cluster(folder: Path) -> list[Situation]:
    """Return the situations that need no running Slurm. folder: where files for them may be written."""
    commands = folder / "commands"  # of a machine without Slurm
    commands.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for command in Path(place).glob("*"):
            if command.name not in SLURM and not (commands / command.name).is_symlink():
                (commands / command.name).symlink_to(command)
    down = folder / "down.conf"
    down.write_text(
        "ClusterName=down\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=9\nAuthType=auth/munge\n"
        "AuthInfo=socket=/nonexistent/munge\nNodeName=n1\nPartitionName=debug Nodes=n1\n"
    )
    nothing, real = {"SLURM_CONF": None}, {"PATH": os.environ["PATH"]}
    return [
        Situation("no Slurm", "local", "Slurm is not installed here", {**nothing, "PATH": str(commands)}),
        Situation("Slurm's commands, no cluster", "local", "no cluster is configured", {**nothing, **real}),
        Situation("a cluster that is down", "local", "does not answer", {**real, "SLURM_CONF": str(down)}),
    ]


def with_cluster(cluster: SlurmCluster) -> list[Situation]:
    environment = cluster.variables
    return [
        Situation("a cluster", "slurm", "controller answers", environment),
        Situation("inside salloc", "allocation", "this is inside Slurm job", environment, ALLOCATION),
    ]


@contextlib.contextmanager
def hanging(cluster: SlurmCluster) -> Iterator[Situation]:
    """Make the cluster's controller accept connections without answering any."""
    pid = cluster.pid("slurmctld")
    os.kill(pid, signal.SIGSTOP)
    try:
        environment = cluster.variables
        yield Situation("a cluster that hangs", "local", "does not answer", environment)
    finally:
        os.kill(pid, signal.SIGCONT)
