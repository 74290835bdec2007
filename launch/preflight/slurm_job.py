"""Check a recipe against Slurm, which judges the request of each component itself: `sbatch --test-only`.

Checks of our own are for what Slurm takes and never starts: components that do not fit together (here), a partition's limits
where Slurm does not enforce them (`slurm_nodes.py`), limits of accounts (`slurm_limits.py`). Why Slurm refuses a request, in
keys of the recipe, is in `slurm_refusals.py`. What Slurm does not answer is noted.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from itertools import combinations

from launch import slurm_client
from launch.components import components
from launch.preflight import slurm_limits, slurm_request, squashfuse
from launch.preflight.slurm_limits import Accounting
from launch.preflight.slurm_nodes import Cluster, counted
from launch.preflight.slurm_refusals import RefusalExaminer
from launch.preflight.slurm_request import ComponentRequest
from launch.preflight.slurm_sbatch import SbatchTester, option_problems
from launch.slurm_client import SlurmError
from pipeline.config import Problem, Recipe


def problems(recipe: Recipe, notes: list[str] | None = None) -> Iterator[Problem]:
    """Yield what Slurm refuses, or takes and never starts. notes: what could not be asked, or only takes time, is appended."""
    notes = [] if notes is None else notes
    yield from slurm_request.problems(recipe)
    notes += slurm_request.notes(recipe)
    yield from container_problems(recipe, notes)
    requests = slurm_request.requests(recipe)
    if wrong := [*option_problems(requests)]:  # sbatch would say no more about these components
        yield from wrong
        spoilt = {problem.key for problem in wrong}
        requests = [request for request in requests if not spoilt & set(map(request.key_of, request.options))]
    try:
        cluster, tester = Cluster(), SbatchTester()
        yield from _of_all(cluster, tester, requests, notes)
    except SlurmError as why:
        notes.append(f"partitions, nodes and accounts were not checked: {why}")


def _of_all(cluster: Cluster, tester: SbatchTester, requests: list[ComponentRequest], notes: list[str]) -> Iterator[Problem]:
    if len(requests) > 1 and (kind := cluster.config.get("SchedulerType", "sched/backfill")) != "sched/backfill":
        why = f"a job of several components is only started by Slurm's backfill scheduler, and this cluster has {kind}"
        help_ = "its administrators can set SchedulerType=sched/backfill"
        yield Problem(f"{requests[-1].key}.nodes", "unsupported", f"{why}; {help_}")
    user = pwd.getpwuid(os.getuid()).pw_name
    accounting = _accounting(cluster, user, notes)
    examiner, taken = RefusalExaminer(cluster, accounting, tester, notes), []
    for request in requests:
        found = examiner.refusal(request)
        yield from found
        taken += [] if found else [request]
    limited = accounting is not None and cluster.enforced & {"limits", "safe"}
    if len(taken) > 1 or limited:
        would_do = {request: tester.nodes_for(request, cluster) for request in taken}
        yield from _together(would_do)
        if limited:
            whole = [counted(request, cluster, names) for request, names in would_do.items()]
            yield from slurm_limits.problems(accounting, user, [(each, cluster.partition(each)) for each in whole])


def _accounting(cluster: Cluster, user: str, notes: list[str]) -> Accounting | None:
    """Ask accounting. Return None where it keeps no job from running, or says nothing."""
    if "associations" not in cluster.enforced:
        notes.append("accounts and QOS were not checked: this cluster does not enforce them")
        return None
    try:
        return slurm_limits.accounting(cluster.config["ClusterName"], user)
    except SlurmError as why:
        notes.append(f"accounts and QOS were not checked: {why}")
        return None


def _together(would_do: dict[ComponentRequest, frozenset[str]]) -> Iterator[Problem]:
    """would_do: the nodes that would do for each component. Two components never share a node.

    Slurm takes such a job, and it waits for ever. By Hall's theorem there is a choice of nodes if and only if any number of
    components find as many nodes as they ask for among those that would do for one of them.
    """
    for count in range(2, len(would_do) + 1):
        for some in combinations(would_do, count):
            wanted, there = sum(each.nodes for each in some), len(frozenset().union(*(would_do[each] for each in some)))
            if wanted > there:
                terms = " + ".join(str(each.nodes) for each in some)
                yield Problem(
                    f"{some[-1].key}.nodes",
                    "over-limit",
                    f"{', '.join(f'{each.key}.nodes' for each in some)} ask for {terms} nodes, but there are {there} that would"
                    f" do; expected together at most {there}. Try fewer, or cluster.share_nodes=true to put components on the"
                    " same nodes",
                )
                return


def container_problems(recipe: Recipe, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem if images are used and srun does not have pyxis's options. What containers cannot save is noted."""
    used = [f"cluster.{name}.container_image" for name, each in components(recipe).items() if each.container_image]
    if not used:
        return
    try:
        options = slurm_client.run_command("srun", "--help")
    except SlurmError as why:
        notes.append(f"whether srun takes a container image was not checked: {why}")
        return
    with contextlib.suppress(SlurmError):  # which is noted where more is asked
        notes += squashfuse.notes(used, slurm_client.configuration())
    if "--container-image" not in options:
        for key in used:
            yield Problem(
                key,
                "not-installed",
                "srun here has no --container-image, which comes with the pyxis plugin (https://github.com/NVIDIA/pyxis). Try"
                " null, and an environment on the shared file system",
            )
