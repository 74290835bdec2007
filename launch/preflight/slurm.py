"""What Slurm would say against a recipe, and what it would not say: sbatch takes jobs that can never start.

Partitions and containers here; nodes, gres and features in `slurm_nodes.py`; accounts, QOS and limits in `slurm_accounts.py`.
What Slurm does not answer is left out and noted. Leaves out what only Slurm's own plugins know
(job_submit.lua).
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from collections.abc import Iterator
from difflib import get_close_matches

from launch.components import components
from launch.preflight import slurm_accounts, slurm_nodes, slurm_request, squashfuse
from launch.preflight.slurm_cluster import Accounting, Fields, SlurmCluster, Unanswered, ask, configuration, minutes
from launch.preflight.slurm_request import Request
from pipeline.config import Recipe


def problems(recipe: Recipe, notes: list[str] | None = None) -> Iterator[str]:
    """notes: what could not be asked, and what will only take its time, is appended to it."""
    notes = [] if notes is None else notes
    yield from slurm_request.problems(recipe)
    notes += slurm_request.notes(recipe)
    yield from container_problems(recipe, notes)
    try:
        cluster = SlurmCluster()
        cluster.nodes  # noqa: B018 asked here, so that a failure is noted once
    except Unanswered as why:
        notes.append(f"partitions, nodes and accounts were not checked: {why}")
        return
    user = pwd.getpwuid(os.getuid()).pw_name
    accounting = _accounting(cluster, user, notes)
    requests = slurm_request.requests(recipe)
    if len(requests) > 1 and cluster.config.get("SchedulerType", "sched/backfill") != "sched/backfill":
        yield (
            f"{requests[-1].key}.nodes: a job of several components is only started by Slurm's backfill scheduler, and this"
            f" cluster has {cluster.config['SchedulerType']}; its administrators can set SchedulerType=sched/backfill"
        )
    chosen: list[tuple[Request, Fields]] = []
    would_do: dict[str, tuple[int, set[str]]] = {}
    for request in requests:
        given, found = [], []
        for name in request.partitions or (cluster.default_partition,):
            against = [*_against(cluster, accounting, request, name)]
            found += against
            given += [] if against else [cluster.partitions[name]]
        if given:  # one of them is enough
            nodes = [node for partition in given for node in slurm_nodes.fitting(cluster, partition, request)]
            chosen.append((slurm_nodes.counted(request, nodes), given[0]))
            would_do[request.key] = request.nodes, {node.name for node in nodes}
            _note_unavailable(request, {node.name for node in nodes if node.available}, len(would_do[request.key][1]), notes)
            _note_idle(request, min(node.gpus for node in nodes), notes)
        else:
            instead = _others_that_do(cluster, accounting, request)
            yield from found
            if instead:
                yield f"{request.key}.partition: {' or '.join(instead)} would do for what {request.key} asks for"
    yield from slurm_nodes.problems_together(would_do)
    if accounting:
        yield from slurm_accounts.problems(cluster, accounting, user, chosen)


def _accounting(cluster: SlurmCluster, user: str, notes: list[str]) -> Accounting | None:
    """None where it keeps no job from running, or says nothing."""
    if "associations" not in cluster.enforced:
        notes.append("accounts and QOS were not checked: this cluster does not enforce them")
        return None
    try:
        return cluster.accounting(user)
    except Unanswered as why:
        notes.append(f"accounts and QOS were not checked: {why}")
        return None


def _note_unavailable(request: Request, available: set[str], in_all: int, notes: list[str]) -> None:
    if len(available) < request.nodes:
        notes.append(
            f"{request.key}.nodes: {request.nodes}, and of the {in_all} nodes that would do {len(available)} are not down or"
            " drained just now: the job will wait for more"
        )


def _note_idle(request: Request, gpus: int, notes: list[str]) -> None:
    """gpus: of each node, at least."""
    if request.whole and 0 < request.gpus < gpus:
        notes.append(
            f"{request.keys('gpus_per_node')}: {request.gpus}, and the job takes whole nodes of {gpus} or more GPUs;"
            f" {request.key}.exclusive=false with cpus_per_task and mem leaves the others to other jobs"
        )


def _others_that_do(cluster: SlurmCluster, accounting: Accounting | None, request: Request) -> list[str]:
    return [
        name
        for name in cluster.partitions
        if name not in request.partitions and not any(_against(cluster, accounting, request, name))
    ][:3]


# ---- one partition ------------------------------------------------------------------------------------------------------


def _against(cluster: SlurmCluster, accounting: Accounting | None, request: Request, name: str | None) -> Iterator[str]:
    """Why a component cannot run in a partition. name: None where Slurm has no default one."""
    key, there = f"{request.key}.partition", ", ".join(cluster.partitions)
    if name is None:
        yield f"{key}: null, and this cluster has no default partition; one of: {there}"
        return
    if name not in cluster.partitions:
        near = get_close_matches(name, cluster.partitions, 1)
        yield f"{key}: there is no partition '{name}'; {f'did you mean {near[0]!r}?' if near else f'one of: {there}'}"
        return
    partition = cluster.partitions[name]
    if (state := partition.get("State", "UP")) != "UP":
        yield f"{key}: {name} is {state} and starts no jobs; another, or wait until it is UP"
    yield from _admission(accounting, request, partition)
    yield from _sizes(accounting, request, partition)
    yield from slurm_nodes.problems(cluster, partition, request)


def _admission(accounting: Accounting | None, request: Request, partition: Fields) -> Iterator[str]:
    name = partition["PartitionName"]
    groups = partition.get("AllowGroups", "ALL")
    if groups != "ALL" and os.getuid() != 0 and not _groups() & set(groups.split(",")):
        yield f"{request.key}.partition: {name} is for the groups {groups}, and you are in none of them; another"
    if partition.get("RootOnly") == "YES" and os.getuid() != 0:
        yield f"{request.key}.partition: only root may submit to {name}; another"
    if partition.get("ReqResv") == "YES" and "reservation" not in request.options and "SBATCH_RESERVATION" not in os.environ:
        yield (
            f"{request.key}.partition: {name} takes only jobs with a reservation; another, or"
            f" {request.key}.sbatch_options={{reservation: NAME}}"
        )
    own = {
        "account": slurm_accounts.effective_account(request, accounting),
        "qos": slurm_accounts.effective_qos(accounting, request, name),
    }
    for key, kind in (("account", "Accounts"), ("qos", "Qos")):
        allowed, denied = partition.get(f"Allow{kind}", "ALL"), partition.get(f"Deny{kind}", "")
        if own[key] is None:
            continue
        if allowed != "ALL" and own[key] not in allowed.split(","):
            yield f"{request.key}.{key}: '{own[key]}' may not use partition {name}; one of: {allowed}"
        elif own[key] in denied.split(","):
            yield f"{request.key}.{key}: '{own[key]}' may not use partition {name}; any but: {denied}"


def _groups() -> set[str]:
    names = set()
    for number in (os.getgid(), *os.getgroups()):
        with contextlib.suppress(KeyError):  # a number may have no name, and Slurm allows by name
            names.add(grp.getgrgid(number).gr_name)
    return names


def _sizes(accounting: Accounting | None, request: Request, partition: Fields) -> Iterator[str]:
    name = partition["PartitionName"]
    qos = slurm_accounts.effective_qos(accounting, request, name)
    flags = accounting.qos.get(qos or "", {}).get("Flags", "") if accounting else ""
    limit = minutes(partition.get("MaxTime", "UNLIMITED"))
    if limit is not None and request.minutes > limit and "PartitionTimeLimit" not in flags:
        yield (
            f"cluster.time_min: {request.minutes}, but partition {name} ({request.key}) allows {limit:g} minutes; at most"
            f" {limit:g}"
        )
    most, least = partition.get("MaxNodes", "UNLIMITED"), partition.get("MinNodes", "0")
    if most.isdigit() and request.nodes > int(most) and "PartitionMaxNodes" not in flags:
        yield f"{request.key}.nodes: {request.nodes}, but a job in partition {name} may have {most}; at most {most}"
    if least.isdigit() and request.nodes < int(least) and "PartitionMinNodes" not in flags:
        yield f"{request.key}.nodes: {request.nodes}, but a job in partition {name} must have {least}; at least {least}"


# ---- containers ---------------------------------------------------------------------------------------------------------


def container_problems(recipe: Recipe, notes: list[str]) -> Iterator[str]:
    """That srun has pyxis's options, if they are used. What cannot be saved in containers is noted."""
    used = [f"cluster.{name}.container_image" for name, each in components(recipe).items() if each.container_image]
    if not used:
        return
    try:
        options = ask("srun", "--help")
    except Unanswered as why:
        notes.append(f"whether srun takes a container image was not checked: {why}")
        return
    with contextlib.suppress(Unanswered):  # which is noted where more is asked
        notes += squashfuse.notes(used, configuration())
    if "--container-image" not in options:
        yield (
            f"{', '.join(used)}: srun here has no --container-image, which comes with the pyxis plugin"
            " (https://github.com/NVIDIA/pyxis); where there is none, null and an environment on the shared file system"
        )
