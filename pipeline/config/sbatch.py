"""Which options of sbatch `sbatch_options` may give: not those that another key stands for, nor what a job cannot do with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.config.layout import colocated
from pipeline.config.schema import Recipe

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
"""Options that a key of a component stands for."""
OF_THE_JOB = {
    "job-name": "name",
    "time": "cluster.time_min",
    "requeue": "cluster.requeue.enabled",
    "no-requeue": "cluster.requeue.enabled",
    "dependency": "needs",
    "output": "run_dir",
    "error": "run_dir",
}
REFUSED = {
    "signal": "the job has one of its own, by which ranks save before its time is up",
    "open-mode": "each start of the job appends to the log",
    "kill-on-invalid-dep": "a job whose needed run failed is ended",
    "array": "Slurm has no arrays of heterogeneous jobs; try launch/sweep.py",
    "wrap": "the job has its own script",
    "export": "ranks need the variables of the shell that submits",
    "export-file": "ranks need the variables of the shell that submits",
    "clusters": "the job's state would be asked of another cluster; submit there",
    "test-only": "nothing would be submitted; try dry_run=true",
    "wait": "launch/submit.py waits by itself",
    **dict.fromkeys(("parsable", "quiet", "help", "usage", "version", "verbose"), "it changes what sbatch prints"),
}


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for options that cannot be given, under their names or an abbreviation that sbatch takes."""
    sections = {"cluster": recipe.cluster.sbatch_options}
    sections |= {f"cluster.{name}": getattr(recipe.cluster, name).sbatch_options for name in ("train", "generate", "reward")}
    for section, options in sections.items():
        key, component = f"{section}.sbatch_options", "cluster.train" if section == "cluster" else section
        whys = {name: f"set by {component}.{meant}; try that" for name, meant in OF_A_COMPONENT.items()}
        whys |= {name: f"set by {meant}; try that" for name, meant in OF_THE_JOB.items()} | REFUSED
        for name in options:
            if not NAME.fullmatch(name):
                yield (
                    f"{key}.{name}",
                    f"{key}: got the name {name!a}; expected a long option of sbatch without --, as in reservation",
                )
            elif why := next((why for full, why in whys.items() if full.startswith(name)), None):
                yield f"{key}.{name}", f"{key}: got {name}; {why}"


def guests(recipe: Recipe) -> tuple[str, ...]:
    """Return the components whose ranks are on cluster.train's nodes."""
    if colocated(recipe):
        return ("generate",)
    return ("generate", "reward") if recipe.cluster.share_nodes else ()


def of_guests(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each component that has options of its own, and no nodes."""
    for name in guests(recipe):
        if getattr(recipe.cluster, name).sbatch_options:
            yield f"cluster.{name}.sbatch_options: its ranks are on cluster.train's nodes. Try cluster.train.sbatch_options"
