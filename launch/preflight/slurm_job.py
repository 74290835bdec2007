"""Check a recipe against Slurm. `sbatch --test-only` judges the request of each component.

Our own checks cover requests that Slurm accepts and never starts: components that do not fit together (here), and limits of
partitions and accounts that it does not enforce (`slurm_limits.py`). `slurm_refusals.py` finds the recipe's keys behind a
refusal. A check to which Slurm gives no answer becomes a note.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from itertools import combinations

from launch.executors import slurm_client
from launch.executors.components import components
from launch.executors.slurm_client import SlurmError
from launch.preflight import container_images, slurm_limits, slurm_request
from launch.preflight.slurm_limits import Accounting
from launch.preflight.slurm_nodes import Cluster, count_whole_nodes
from launch.preflight.slurm_refusals import RefusalExaminer
from launch.preflight.slurm_request import ComponentRequest
from launch.preflight.slurm_sbatch import SbatchTester, option_problems
from pipeline.config import Problem, Recipe


def problems(recipe: Recipe, notes: list[str] | None = None) -> Iterator[Problem]:
    """Yield problems of requests that Slurm refuses, or accepts and never starts.

    notes: receives checks that were not possible, and expected waits.
    """
    notes = [] if notes is None else notes
    notes += slurm_request.notes(recipe)
    yield from container_problems(recipe, notes)
    requests = slurm_request.requests(recipe)
    if wrong := [*option_problems(requests)]:  # sbatch could not judge these components further
        yield from wrong
        bad_keys = {problem.key for problem in wrong}
        requests = [request for request in requests if not bad_keys & set(map(request.key_of, request.options))]
    try:
        cluster, tester = Cluster(), SbatchTester()
        yield from _site_problems(cluster, tester, requests, notes)
    except SlurmError as why:
        notes.append(f"partitions, nodes and accounts were not checked: {why}")


def _site_problems(
    cluster: Cluster, tester: SbatchTester, requests: list[ComponentRequest], notes: list[str]
) -> Iterator[Problem]:
    if len(requests) > 1 and (kind := cluster.config.get("SchedulerType", "sched/backfill")) != "sched/backfill":
        message = f"only Slurm's backfill scheduler starts a job of several components, and this cluster has {kind}"
        help_ = "its administrators can set SchedulerType=sched/backfill"
        yield Problem(f"{requests[-1].key}.nodes", "unsupported", f"{message}; {help_}")
    user = pwd.getpwuid(os.getuid()).pw_name
    accounting = _accounting(cluster, user, notes)
    examiner, accepted = RefusalExaminer(cluster, accounting, tester, notes), []
    for request in requests:
        refusal = examiner.refusal(request)
        yield from refusal
        accepted += [] if refusal else [request]
    limits_of = accounting if cluster.enforced_parts & {"limits", "safe"} else None
    if len(accepted) > 1 or limits_of:
        suitable = {request: tester.nodes_for(request, cluster) for request in accepted}
        yield from _start_together(suitable)
        if limits_of is not None:
            counted_requests = [count_whole_nodes(request, cluster, names) for request, names in suitable.items()]
            yield from slurm_limits.problems(
                limits_of, user, [(counted, cluster.partition(counted)) for counted in counted_requests]
            )


def _accounting(cluster: Cluster, user: str, notes: list[str]) -> Accounting | None:
    """Return the user's accounting; None, with a note, if the cluster does not enforce it, or sacctmgr does not answer."""
    if "associations" not in cluster.enforced_parts:
        notes.append("accounts and QOS were not checked: this cluster does not enforce them")
        return None
    try:
        return slurm_limits.accounting(cluster.config["ClusterName"], user)
    except SlurmError as why:
        notes.append(f"accounts and QOS were not checked: {why}")
        return None


def _start_together(suitable: dict[ComponentRequest, frozenset[str]]) -> Iterator[Problem]:
    """Yield a problem if there are too few suitable nodes to start all components at once, each on nodes of its own.

    suitable: request of a component -> names of its suitable nodes. Slurm accepts such a job, and it waits forever. By Hall's
    theorem nodes can be assigned if and only if, for every set of components, at least as many nodes are suitable for one or
    more of them as the set requests.
    """
    for count in range(2, len(suitable) + 1):
        for group in combinations(suitable, count):
            requested = sum(request.host.nodes for request in group)
            available = len(frozenset().union(*(suitable[request] for request in group)))
            if requested > available:
                terms = " + ".join(str(request.host.nodes) for request in group)
                yield Problem(
                    f"{group[-1].key}.nodes",
                    "over-limit",
                    f"{', '.join(f'{request.key}.nodes' for request in group)} ask for {terms} nodes, but there are {available}"
                    f" suitable ones; expected at most {available} in total. Try fewer, or cluster.share_nodes=true to put"
                    " components on the same nodes",
                )
                return


def container_problems(recipe: Recipe, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each image key if srun lacks pyxis's options.

    notes: receives warnings that an image's import delays the start, and that srun's options could not be checked.
    """
    used = [f"cluster.{name}.container_image" for name, component in components(recipe).items() if component.container_image]
    if not used:
        return
    notes += container_images.import_notes(recipe)
    try:
        options = slurm_client.run_command("srun", "--help")
    except SlurmError as why:
        notes.append(f"whether srun takes a container image was not checked: {why}")
        return
    if "--container-image" not in options:
        for key in used:
            yield Problem(
                key,
                "not-installed",
                "srun here has no --container-image, which comes with the pyxis plugin (https://github.com/NVIDIA/pyxis). Try"
                " null, with a Python environment on the shared file system",
            )
