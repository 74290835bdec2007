"""Define the type of `sbatch_options`: options of sbatch that no other key sets and that do not break the job."""

from __future__ import annotations

import re
from typing import Annotated

from pipeline.recipe.values import Check, Line

NAME = re.compile(r"[a-z][a-z0-9-]+")
OF_A_COMPONENT = {
    "nodes": "nodes",
    "ntasks": "nodes and ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "tasks-per-node": "ranks_per_node",
    "cpus-per-task": "cpus_per_task",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "mem": "mem",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "exclusive": "exclusive",
    **{key: key for key in ("partition", "account", "qos", "constraint")},
}
"""Option -> the key of a component that sets it."""
OF_THE_JOB = {  # option -> the key that sets it
    "job-name": "name",
    "time": "cluster.time_min",
    "requeue": "cluster.requeue.enabled",
    "no-requeue": "cluster.requeue.enabled",
    "dependency": "needs",
    "output": "run_dir",
    "error": "run_dir",
}
REFUSED = {
    "signal": "the job sets its own, so that ranks save before the time limit",
    "open-mode": "every start of the job appends to the log",
    "kill-on-invalid-dep": "the launcher sets it, so that a job is cancelled if a run that it needs fails",
    "array": "Slurm has no arrays of heterogeneous jobs; try launch/sweep.py",
    "wrap": "the job has its own script",
    "export": "ranks need the variables of the shell that submits",
    "export-file": "ranks need the variables of the shell that submits",
    "clusters": "commands would query the job on another cluster; submit there",
    "test-only": "nothing would be submitted; try dry_run=true",
    "wait": "launch/submit.py waits by itself",
    **dict.fromkeys(("parsable", "quiet", "help", "usage", "version", "verbose"), "it changes what sbatch prints"),
}


MEANT = {name: f"which {key} of the component sets" for name, key in OF_A_COMPONENT.items()}
MEANT |= {name: f"which {key} sets" for name, key in OF_THE_JOB.items()} | REFUSED
"""Option -> why it is refused."""


def _refused(name: str) -> str | None:
    """Return the reason why an option, or sbatch's abbreviation of an option, is refused; None if it is allowed."""
    if not NAME.fullmatch(name):
        return f"got the name {name!a}; expected a long option of sbatch without --, as in reservation"
    why = next((why for full, why in MEANT.items() if full.startswith(name)), None)
    return why and f"got {name}: {why}"


Options = dict[Annotated[str, Check(_refused, "unsupported")], Line | None]
