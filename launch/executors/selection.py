"""Choose the executor that runs a recipe: Slurm, the allocation that this shell is in, or processes on this machine.

`cluster.executor=auto` takes, the first that applies:
    allocation   inside an salloc or launch/hetstep.sbatch, where steps can start
    slurm        a Slurm controller answers; asked for at most slurm_client.PING_S
    local        else
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from launch import slurm_client
from launch.executors import allocation
from pipeline.config import Recipe

WHAT = {
    "slurm": "a Slurm job",
    "allocation": "the Slurm allocation that this shell is in",
    "local": "processes on this machine",
}


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    name: str  # slurm, allocation, local
    reason: str = ""  # empty: the recipe names it

    def __str__(self) -> str:
        return f"cluster.executor=auto: {self.name} ({WHAT[self.name]}), because {self.reason}"


def choose(recipe: Recipe) -> ExecutorChoice:
    """Choose the executor. Asks Slurm only where the recipe leaves it open."""
    if (named := recipe.cluster.executor) != "auto":
        return ExecutorChoice(named)
    if job_id := allocation.current():
        reason = f"this is inside Slurm job {job_id}; cluster.executor=slurm submits a job of its own"
        return ExecutorChoice("allocation", reason)
    if why := slurm_client.unreachable():
        insist = "" if why == slurm_client.NOT_INSTALLED else "; cluster.executor=slurm insists on Slurm"
        return ExecutorChoice("local", f"{why}{insist}")
    step = os.environ.get("SLURM_JOB_ID")
    inside = f", and this is a step of Slurm job {step}, in which no more steps can start" if step else ""
    return ExecutorChoice("slurm", f"Slurm's controller answers{inside}")
