"""Choose the executor of a recipe: Slurm, the allocation of this shell, or processes on this machine.

`cluster.executor=auto` chooses the first that applies:
    allocation   in an salloc or launch/hetstep.sbatch, where steps can start
    slurm        if a Slurm controller answers within slurm_client.PING_S
    local        otherwise
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launch.executors import allocation, slurm_client
from pipeline.config import Recipe
from pipeline.config.config_tree import COMMAND_LINE

DESCRIPTIONS = {
    "slurm": "a Slurm job",
    "allocation": "the Slurm allocation of this shell",
    "local": "processes on this machine",
}
OF_SLURM = re.compile(
    r"cluster\.((train|generate|reward|judge|environment)\.(?!(nodes|gpus_per_node|ranks_per_node|env_vars|gpu|gpu_memory_gb)\b)|sbatch_options)"
)
"""Beginnings of keys that neither a local run nor a plan reads."""


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


def notes(chosen: ExecutorChoice, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on keys of the command line that only Slurm reads, for a local run. origins: as in `Loaded`."""
    keys = [key for key, origin in origins.items() if origin == COMMAND_LINE and OF_SLURM.match(key)]
    if chosen.name == "local" and keys:
        yield f"{', '.join(keys)}: no effect, because the executor is local. Try cluster.executor=slurm"
