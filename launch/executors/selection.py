"""Choose the executor of a recipe: Slurm, the allocation of this shell, or processes on this machine.

`cluster.executor=auto` chooses the first that applies:
    allocation   in an salloc or launch/hetstep.sbatch, where steps can start
    slurm        if a Slurm controller answers within slurm_client.PING_S
    local        otherwise
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from launch.executors import allocation, slurm_client
from pipeline.config import Recipe

DESCRIPTIONS = {
    "slurm": "a Slurm job",
    "allocation": "the Slurm allocation of this shell",
    "local": "processes on this machine",
}


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    """The executor of a recipe, and why it was chosen."""

    name: str  # slurm, allocation or local
    reason: str = ""  # empty if the recipe names the executor

    def __str__(self) -> str:
        return f"cluster.executor=auto: {self.name} ({DESCRIPTIONS[self.name]}), because {self.reason}"


def choose(recipe: Recipe) -> ExecutorChoice:
    """Choose the executor. Queries Slurm only for cluster.executor=auto."""
    if (named := recipe.cluster.executor) != "auto":
        return ExecutorChoice(named)
    if job_id := allocation.current():
        reason = f"this is inside Slurm job {job_id}; set cluster.executor=slurm to submit another job"
        return ExecutorChoice("allocation", reason)
    if why := slurm_client.unreachable():
        insist = "" if why == slurm_client.NOT_INSTALLED else "; with cluster.executor=slurm this is an error"
        return ExecutorChoice("local", f"{why}{insist}")
    step = os.environ.get("SLURM_JOB_ID")
    inside = f", and this is a step of Slurm job {step}, which cannot start other steps" if step else ""
    return ExecutorChoice("slurm", f"Slurm's controller answers{inside}")
